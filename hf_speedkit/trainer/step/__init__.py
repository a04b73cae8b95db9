"""What a step runs on and computes: layers, loss, clipping, optimizer.

- layers: packed_layers, noise
- loss: loss, loss_head, own_loss, watched_loss, expert_balance
- behind the backward pass: updates, garbage
"""
