"""The report's look: light or dark as the reader's device is, from a phone up."""

__all__ = ["CSS"]

CSS = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2128;--dim:#5b6570;--line:#d9dee4;
--card:#f5f7f9;--blue:#1f6feb;--green:#1a7f37;--amber:#b35900;--red:#cf222e;
--violet:#8250df}
@media(prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e4e8ed;--dim:#98a3af;
--line:#2c343d;--card:#181e25;--blue:#58a6ff;--green:#3fb950;--amber:#e0982f;
--red:#ff6b63;--violet:#b78cff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:66rem;padding:1rem;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .6rem}
a{color:var(--blue)}.dim{color:var(--dim)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;
margin:1rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:.5rem;
padding:.5rem .7rem}.tile b{display:block;font-size:1.15rem}.tile span{color:var(--dim);
font-size:.85rem}
.good{color:var(--green)}.bad{color:var(--red)}
figure{margin:0 0 1.2rem}figcaption{display:flex;flex-wrap:wrap;gap:.2rem 1rem;
margin-bottom:.3rem}
.key{color:var(--dim);font-size:.85rem}.key i{display:inline-block;width:1rem;height:0;
border-width:3px 0 0;border-style:solid;margin-right:.35rem;vertical-align:middle}
.plot{position:relative;height:11rem;border-bottom:1px solid var(--line)}
.plot svg,.strip svg{width:100%;height:100%;display:block}.strip{height:2.2rem}
.plot span{position:absolute;left:.2rem;font-size:.75rem;color:var(--dim);
background:var(--bg);padding:0 .2rem;opacity:.85}.plot .top{top:0}
.plot .bottom{bottom:0}
.axis{display:flex;justify-content:space-between;font-size:.75rem;color:var(--dim)}
path{fill:none;vector-effect:non-scaling-stroke}
.curve{stroke-width:2;stroke-linecap:round;stroke-linejoin:round}
.grid{stroke:var(--line);stroke-width:1}
.mark{stroke-width:2}
.blue{stroke:var(--blue);border-color:var(--blue)}
.green{stroke:var(--green);border-color:var(--green)}
.amber{stroke:var(--amber);border-color:var(--amber)}
.red{stroke:var(--red);border-color:var(--red)}
.violet{stroke:var(--violet);border-color:var(--violet)}
.dashed{stroke-dasharray:6 5;border-top-style:dashed!important}
.odd,.even{fill:var(--dim);opacity:.07}.even{opacity:.16}
.ran{fill:var(--blue);opacity:.55}.done{fill:var(--green);opacity:.6}
.failed{fill:var(--red);opacity:.5}.again{fill:var(--amber);opacity:.55}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);
vertical-align:top}th{color:var(--dim);font-weight:500}
td.n{white-space:nowrap;font-variant-numeric:tabular-nums;overflow-wrap:normal}
tr.warning td:last-child{color:var(--amber)}tr.error td:last-child{color:var(--red)}
details{background:var(--card);border:1px solid var(--line);border-radius:.5rem;
padding:.5rem .7rem;margin:.5rem 0}summary{cursor:pointer}
pre{white-space:pre-wrap;font:13px/1.45 ui-monospace,monospace;margin:.6rem 0 0}
footer{margin:2rem 0 1rem;color:var(--dim);font-size:.85rem}
"""
