"""The `hf-speedkit` command, one file per subcommand; heavy imports happen inside the commands.

- the command: main
- doctor: doctor, doctor_model, doctor_view
- plan: plan, plan_data, plan_memory, plan_view
- trace: trace, trace_view
- report: report, report_page, report_charts, report_style, report_trace, report_wandb, report_bench, report_tables
- bench, recipe, export: bench, recipe, export
"""
