"""The style sheet of a run's page."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --panel: #f6f7f9; --ink: #1b1f24; --dim: #59636e; --rule: #d5dae0;
  --line-0: #0063a8; --line-1: #b34700; --alarm: #c0172b;
  --s0: #0072b2; --s1: #d55e00; --s2: #00805c; --s3: #b0558a; --s4: #8a7200; --s5: #3584b5; --s6: #6a57b8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --panel: #1d2228; --ink: #e8ebee; --dim: #a3adb8;
  --rule: #39414a; --line-0: #6cb8f0; --line-1: #ff9a4d; --alarm: #ff7b88;
  --s0: #56aee8; --s1: #f0883e; --s2: #3fc79b; --s3: #e08bbb; --s4: #d9bd3c; --s5: #8cc8ee; --s6: #ab9cf2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1500px; margin: 0 auto; padding: 16px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 32px 0 8px; font-size: 20px; }
header p { margin: 4px 0 16px; color: var(--dim); overflow-wrap: anywhere; }
figure { margin: 0; }
figcaption { font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; margin: 0; }
.tiles div { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; padding: 8px 12px; }
.tiles dt { color: var(--dim); font-size: 14px; }
.tiles dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); gap: 24px 16px; }
.chart { display: block; width: 100%; height: auto; font-size: 12px; fill: var(--dim); }
.chart .x { text-anchor: middle; } .chart .y { text-anchor: end; }
.chart .grid { stroke: var(--rule); fill: none; } .chart .axis { stroke: var(--dim); fill: none; }
.chart .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.chart .band { fill: none; stroke-width: 1; opacity: .65; }
.chart .line-0 { stroke: var(--line-0); } .chart .line-1 { stroke: var(--line-1); stroke-dasharray: 5 3; }
.chart .dot-0 { fill: var(--line-0); } .chart .dot-1 { fill: var(--line-1); }
.chart .gap { stroke: var(--alarm); stroke-width: 1.6; fill: none; }
.key { margin-left: 12px; font-weight: 400; font-size: 14px; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 22px; margin-right: 5px; vertical-align: 4px;
  border-top: 2px solid var(--line-0); }
.key-1::before { border-top: 2px dashed var(--line-1); }
.wide { overflow-x: auto; margin: 16px 0; } .wide:focus-visible, pre:focus-visible { outline: 2px solid var(--line-0); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
caption { text-align: left; font-weight: 600; font-size: 16px; padding-bottom: 4px; }
th, td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { font-weight: 400; color: var(--dim); } tbody th { text-align: left; color: var(--ink); }
td:nth-child(2) { min-width: 6em; }
summary { cursor: pointer; padding: 4px 0; color: var(--line-0); }
.pack { margin: 20px 0; }
.bar { display: block; width: 100%; height: 34px; border: 1px solid var(--dim); border-radius: 3px; margin-top: 4px; }
.bar, .swatch.padding { background: repeating-linear-gradient(45deg, var(--dim) 0 1px, var(--paper) 1px 6px);
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.bar rect.padding { fill: transparent; }
.bar g { fill: var(--s); } .bar .masked { fill: color-mix(in srgb, var(--s) 35%, var(--paper)); }
.bar .edge { stroke: var(--paper); stroke-width: 2px; vector-effect: non-scaling-stroke; }
.s0 { --s: var(--s0); } .s1 { --s: var(--s1); } .s2 { --s: var(--s2); } .s3 { --s: var(--s3); }
.s4 { --s: var(--s4); } .s5 { --s: var(--s5); } .s6 { --s: var(--s6); }
.legend { color: var(--dim); }
.swatch { display: inline-block; width: 26px; height: 13px; margin: 0 5px 0 10px; border: 1px solid var(--dim);
  vertical-align: -1px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.swatch:first-child { margin-left: 0; }
.swatch.trained { background: var(--s0); }
.swatch.masked { background: color-mix(in srgb, var(--s0) 35%, var(--paper)); }
ol { padding-left: 0; list-style: none; }
li { border-left: 4px solid var(--s); padding: 2px 0 2px 10px; margin: 12px 0; }
li p { margin: 0; overflow-wrap: anywhere; } .place { font-size: 14px; color: var(--dim); }
.text { white-space: pre-wrap; } .text .masked { color: var(--dim); } .text .trained { font-weight: 600; }
.effect { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 8px 0; }
.effect dt { color: var(--dim); } .effect dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; padding: 12px; overflow-x: auto;
  font-size: 13px; }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, tr, li { break-inside: avoid; }
  .wide { overflow: visible; } }
"""
