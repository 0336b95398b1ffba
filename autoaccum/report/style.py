"""The style sheet of every page. All rules are below `.autoaccum`, so that a notebook around them keeps its own."""

_LIGHT = """--aa-page:#f6f6f4;--aa-surface:#fff;--aa-ink:#1b1b1a;--aa-soft:#5c5b57;--aa-rule:#e3e2dc;
--aa-accent:#d0342c;--aa-tint:#fdf1ef;--aa-bad:#b3261e;--aa-note:#fdf6e3;--aa-c0:#2a78d6;--aa-c1:#1baf7a;--aa-c2:#eda100;
--aa-c3:#008300;--aa-c4:#4a3aa7;--aa-c5:#e34948;--aa-c6:#e87ba4;--aa-c7:#eb6834;"""

_DARK = """--aa-page:#141413;--aa-surface:#1e1e1c;--aa-ink:#f2f1ec;--aa-soft:#b3b1a8;--aa-rule:#393834;
--aa-accent:#ff7b6e;--aa-tint:#33211f;--aa-bad:#ff8a80;--aa-note:#2e2a1c;--aa-c0:#4c97ee;--aa-c1:#26a67a;--aa-c2:#d29a1c;
--aa-c3:#3f9e3f;--aa-c4:#9085e9;--aa-c5:#e66767;--aa-c6:#d55181;--aa-c7:#d9662f;"""

_COLOURS = "".join(f".autoaccum .aa-c{place}{{color:var(--aa-c{place})}}\n" for place in range(8))

_RULES = """
.autoaccum{background:var(--aa-page);color:var(--aa-ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
.autoaccum *{box-sizing:border-box}
.autoaccum .aa-main{max-width:1200px;margin:0 auto;padding:28px 20px 48px}
.autoaccum h1,.autoaccum h2,.autoaccum h3{line-height:1.25;font-weight:600;color:inherit;margin:0}
.autoaccum h1{font-size:24px}
.autoaccum h2{font-size:18px;margin:40px 0 12px}
.autoaccum h3{font-size:15px}
.autoaccum p{margin:0 0 8px}
.autoaccum .aa-lead{font-size:17px;color:var(--aa-soft);margin:6px 0 20px;overflow-wrap:anywhere}
.autoaccum .aa-tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:0 0 12px}
.autoaccum .aa-tile{background:var(--aa-surface);border:1px solid var(--aa-rule);border-radius:10px;padding:12px 16px}
.autoaccum .aa-tile dt,.autoaccum .aa-tile .aa-small{color:var(--aa-soft);font-size:13px;font-weight:400;margin:0}
.autoaccum .aa-tile dd{font-size:24px;font-weight:600;line-height:1.3;margin:0}
.autoaccum .aa-card,.autoaccum .aa-figure{background:var(--aa-surface);border:1px solid var(--aa-rule);border-radius:10px;
margin:0}
.autoaccum .aa-facts{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:8px 24px;margin:0;padding:16px}
.autoaccum .aa-facts dt{color:var(--aa-soft);font-weight:400;margin:0}
.autoaccum .aa-facts dd{margin:0;overflow-wrap:anywhere;white-space:pre-line}
.autoaccum .aa-scroll{overflow-x:auto}
.autoaccum .aa-table{border-collapse:collapse;width:100%;font-size:14px;margin:0;border:0;background:none;color:inherit}
.autoaccum .aa-table tr{background:none;border:0}
.autoaccum .aa-table th,.autoaccum .aa-table td{padding:8px 10px;text-align:left;vertical-align:top;border:0;
border-bottom:1px solid var(--aa-rule);font-weight:400}
.autoaccum .aa-table thead th,.autoaccum .aa-table thead td{color:var(--aa-soft);font-size:13px;vertical-align:bottom}
.autoaccum .aa-table tbody tr:last-child>*{border-bottom:0}
.autoaccum .aa-table .aa-num{text-align:right;font-variant-numeric:tabular-nums}
.autoaccum .aa-table .aa-words{min-width:14em;overflow-wrap:anywhere}
.autoaccum .aa-table td.aa-num,.autoaccum .aa-table .aa-short{white-space:nowrap}
.autoaccum .aa-small{display:block;font-size:12px;color:var(--aa-soft);font-weight:400}
.autoaccum .aa-table tr.aa-chosen>*{background:var(--aa-tint);font-weight:600}
.autoaccum .aa-table tr.aa-chosen>:first-child{box-shadow:inset 4px 0 var(--aa-accent)}
.autoaccum .aa-table tr.aa-left-out>*{color:var(--aa-soft)}
.autoaccum .aa-table tr.aa-failed .aa-outcome{color:var(--aa-bad)}
.autoaccum .aa-list{margin:12px 0 0;padding:0 0 0 20px}
.autoaccum .aa-list li{margin:0 0 6px;white-space:pre-line;overflow-wrap:anywhere}
.autoaccum .aa-notes{background:var(--aa-note);border:1px solid var(--aa-rule);border-radius:10px;margin:0;
padding:14px 16px 8px 34px}
.autoaccum .aa-figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));
gap:16px}
.autoaccum .aa-figure{padding:16px;min-width:0}
.autoaccum .aa-wide{grid-column:1/-1;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));
column-gap:32px;align-items:center}
.autoaccum .aa-wide figcaption{grid-column:1/-1}
.autoaccum figcaption{margin:0 0 8px}
.autoaccum figcaption p{color:var(--aa-soft);font-size:13px;margin:2px 0 0;overflow-wrap:anywhere}
.autoaccum .aa-missing{color:var(--aa-soft);margin:8px 0 0}
.autoaccum .aa-picture{display:block;width:100%;max-width:580px;height:auto;overflow:visible}
.autoaccum .aa-picture text{font:11px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--aa-ink)}
.autoaccum .aa-picture .aa-tick{fill:var(--aa-soft)}
.autoaccum .aa-picture .aa-label{paint-order:stroke;stroke:var(--aa-surface);stroke-width:3px;stroke-linejoin:round}
.autoaccum .aa-picture .aa-strong{font-weight:600}
.autoaccum .aa-grid{stroke:var(--aa-rule);stroke-width:1}
.autoaccum .aa-axis{stroke:var(--aa-soft);stroke-width:1}
.autoaccum .aa-limit{stroke:var(--aa-ink);stroke-width:1.4;stroke-dasharray:5 4}
.autoaccum .aa-front{fill:none;stroke:var(--aa-c0);stroke-width:1.6;opacity:.6}
.autoaccum .aa-line{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round}
.autoaccum .aa-whisker{fill:none;stroke:currentColor;stroke-width:1.1;opacity:.75}
.autoaccum .aa-dot{fill:currentColor}
.autoaccum .aa-hollow{fill:var(--aa-surface);stroke:currentColor;stroke-width:1.4}
.autoaccum .aa-ring{fill:none;stroke:var(--aa-accent);stroke-width:2}
.autoaccum .aa-accent{color:var(--aa-accent)}
.autoaccum .aa-muted{color:var(--aa-soft)}
.autoaccum .aa-area{fill:currentColor;opacity:.85}
.autoaccum .aa-data,.autoaccum .aa-forward,.autoaccum .aa-backward,.autoaccum .aa-optimizer{fill:var(--aa-ink);opacity:0}
.autoaccum .aa-forward{opacity:.03}
.autoaccum .aa-backward{opacity:.08}
.autoaccum .aa-optimizer{opacity:.14}
.autoaccum .aa-legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:10px 0 0;padding:0;font-size:13px}
.autoaccum .aa-legend li{display:flex;gap:6px;align-items:baseline;margin:0}
.autoaccum .aa-legend svg{width:14px;height:14px;flex:none;overflow:visible;position:relative;top:2px}
.autoaccum .aa-legend-table{font-size:13px;margin:10px 0 0;width:auto}
.autoaccum .aa-legend-table th,.autoaccum .aa-legend-table td{padding:3px 10px 3px 0}
.autoaccum .aa-swatch{display:inline-block;width:12px;height:12px;border-radius:3px;background:currentColor}
.autoaccum summary{cursor:pointer;padding:12px 16px;color:var(--aa-soft)}
@media (max-width:600px){
.autoaccum .aa-main{padding:20px 14px 32px}
.autoaccum .aa-tiles{grid-template-columns:1fr 1fr;gap:8px}
.autoaccum .aa-tile{padding:10px 12px}
.autoaccum .aa-tile dd{font-size:20px}
.autoaccum .aa-facts{grid-template-columns:minmax(0,1fr);gap:0}
.autoaccum .aa-facts dd{margin:0 0 10px}
.autoaccum .aa-figure{padding:12px}
.autoaccum .aa-picture text{font-size:12.5px}
.autoaccum .aa-table thead{display:none}
.autoaccum .aa-table,.autoaccum .aa-table tbody,.autoaccum .aa-table tr{display:block}
.autoaccum .aa-table tr{padding:8px 0;border-bottom:1px solid var(--aa-rule)}
.autoaccum .aa-table tbody tr:last-child{border-bottom:0}
.autoaccum .aa-table tr.aa-chosen{background:var(--aa-tint);box-shadow:inset 4px 0 var(--aa-accent)}
.autoaccum .aa-table tr.aa-chosen>:nth-child(n){background:none;box-shadow:none}
.autoaccum .aa-table td{display:flex;justify-content:space-between;gap:16px;padding:3px 14px;border:0;text-align:right}
.autoaccum .aa-table td::before{content:attr(data-column);color:var(--aa-soft);font-weight:400;text-align:left;
white-space:normal;flex:none;max-width:45%}
.autoaccum .aa-table .aa-words{min-width:0}
}
"""

STYLE = (
    f".autoaccum{{{_LIGHT}color-scheme:light dark}}\n"
    f"@media (prefers-color-scheme:dark){{.autoaccum{{{_DARK}}}}}\n{_COLOURS}{_RULES}"
)
