"""The report's style sheet: light, printable, one column on a phone."""

from __future__ import annotations

TIMELINE_COLOURS = {
    "GEMM": "#1f5fbf",
    "attention": "#7b3fa0",
    "linear attention": "#b565c9",
    "norm": "#12908e",
    "element-wise": "#e08a1e",
    "copy": "#c9b458",
    "FSDP copy": "#a8862f",
    "optimizer": "#4d8c3a",
    "communication": "#c0392b",
    "reduction": "#5b8ff0",
    "convolution": "#2c5d63",
    "embedding and index": "#8c6d46",
    "loss and softmax": "#d6618f",
    "mask building": "#a03048",
    "dropout and random": "#6f7fa8",
    "memset": "#b8c0cc",
    "other": "#8a93a0",
}
"""A colour for every group of kernels."""

STYLE = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#dfe4ea;--paper:#fff;--back:#f5f6f8;--real:#1f5fbf;--slots:#7fb2ea;
--util:#d9600d}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
sans-serif}
main{max-width:1200px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 10px;overflow-wrap:anywhere}
h3{font-size:16px;margin:22px 0 6px;overflow-wrap:anywhere}
p{margin:6px 0;max-width:110ch}.soft{color:var(--soft);font-size:13px}
.card,figure{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:14px 16px;margin:12px 0}
figure{padding:10px 12px 4px}
figcaption{font-size:14px;display:flex;flex-wrap:wrap;gap:2px 16px;align-items:baseline}
.key{color:var(--soft);font-size:13px;white-space:nowrap}
.key i{display:inline-block;width:14px;height:10px;border-radius:2px;margin-right:5px;background:currentColor}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px 18px;margin:0}
.facts div{min-width:0}.facts dt{color:var(--soft);font-size:13px}
.facts dd{margin:0;font-size:19px;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.facts dd small{font-size:13px;font-weight:400;color:var(--soft)}
.env{font-size:13px;color:var(--soft);overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 16px}
.runs{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:0 16px}
.runs>*{min-width:0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;font-size:14px;padding:4px 0 6px}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;
white-space:nowrap}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:180px}
.verdict{font-size:18px;font-weight:600;border-left:5px solid var(--soft);padding:2px 0 2px 12px;margin:8px 0 14px}
.problem{border-color:#c0392b}.warning{border-color:#d98f00}.note{border-color:#2e8b57}
.finding{border-left:3px solid var(--soft);padding:0 0 0 12px;margin:14px 0}
.finding.problem{border-color:#c0392b}.finding.warning{border-color:#d98f00}.finding.note{border-color:#2e8b57}
.finding ul{margin:4px 0;padding-left:20px;color:var(--soft);font-size:13px}
.finding p,.finding li{overflow-wrap:anywhere}
.tag{font-size:12px;font-weight:600;text-transform:uppercase;letter-spacing:.04em;color:var(--soft);margin-right:8px}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
.end{text-anchor:end}.mid{text-anchor:middle}svg .util-text{fill:var(--util)}
.grid{stroke:var(--line);fill:none}.frame{stroke:#9aa5b1;fill:none}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:butt}
.real{color:var(--real)}.slots{color:var(--slots)}.util{color:var(--util)}
.line.slots{stroke-width:5}.line.device{stroke-width:1.5}
.plain{color:#1f5fbf}.device{color:#111}.other{color:#b565c9}.third{color:#2e8b57}
.r0{color:#1f5fbf}.r1{color:#d9600d}.r2{color:#2e8b57}.r3{color:#7b3fa0}.r4{color:#c0392b}.r5{color:#12908e}.r6{
color:#8c6d46}.r7{color:#5b6675}
.bar{fill:currentColor;stroke:none}
.p0{color:#d9a300}.p1{color:#8259a8}.p2{color:#2b9a8b}.p3{color:#c3cad3}
.out{fill:#5b6675;fill-opacity:.2}.pause{fill:#2e8b57;fill-opacity:.15}
.resumed{stroke:#c0392b;stroke-dasharray:4 3;fill:none;stroke-width:1.5}
.key .swatch-out{background:rgba(91,102,117,.3)}.key .swatch-pause{background:rgba(46,139,87,.25)}
.key .swatch-resumed{width:0;border-left:2px dashed #c0392b;border-radius:0;height:12px;background:none}
.hint{fill:transparent}.hint:hover{fill:rgba(28,36,48,.07)}
.idle{fill:#f1e3e3}.idle-key{color:#f1e3e3}
.narrow{display:none}
@media (max-width:760px){main{padding:16px 10px 40px}.pair{grid-template-columns:minmax(0,1fr)}.wide{display:none}
.narrow{display:block}
.card{padding:12px}.facts{grid-template-columns:repeat(2,minmax(0,1fr))}.facts dd{font-size:17px}figure{
padding:8px 6px 2px}figcaption{padding:0 4px}}
@media print{body{background:#fff}.card,figure{break-inside:avoid}}
"""
