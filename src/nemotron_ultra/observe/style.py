"""Style sheet and hover script of the report page: light and dark, nothing from outside."""

from __future__ import annotations

_LIGHT = """
--page:#f6f7f9;--card:#ffffff;--ink:#1b2330;--soft:#5b6675;--faint:#8a94a3;--rule:#e3e7ec;--grid:#eceff3;--warn:#b42318;
--c0:#2563eb;--c1:#d97706;--c2:#0f9d6b;--c3:#9333ea;--c4:#dc2626;--c5:#0891b2;--c6:#a16207;--c7:#64748b;
--h0:#e9f0fa;--h1:#d9e5f6;--h2:#c6d9f2;--h3:#abc7eb;--h4:#8db3e3;--h5:#6d9cd9;--h6:#5084cc;--h7:#3a6cba;--h8:#2b56a2;
--h9:#204385;--h10:#173267;--h11:#0e2148;
"""
_DARK = """
--page:#0f141b;--card:#171e27;--ink:#e6ebf2;--soft:#a3aebd;--faint:#778394;--rule:#27313d;--grid:#212a35;--warn:#ff8a7a;
--c0:#6ea8ff;--c1:#f5b04c;--c2:#4cd3a0;--c3:#c79bff;--c4:#ff7f7f;--c5:#4fd0e6;--c6:#d9b84a;--c7:#9aa8ba;
--h0:#182433;--h1:#1b3047;--h2:#1d3d5c;--h3:#1f4b73;--h4:#235b8b;--h5:#2b6da3;--h6:#3a80b9;--h7:#5094cb;--h8:#6ca9d9;
--h9:#8dbfe5;--h10:#b3d6ef;--h11:#dcedf8;
"""

CSS = (
    f":root{{color-scheme:light dark;{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1220px;margin:0 auto;padding:28px 22px 60px}
h1{font-size:26px;line-height:1.25;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:36px 0 12px}
h3{font-size:14px;margin:0;font-weight:600}
p{margin:4px 0}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px}
.sub{color:var(--soft)}.faint{color:var(--faint);font-size:12.5px}.warn{color:var(--warn)}
.pill{display:inline-block;padding:0 9px;border:1px solid var(--rule);border-radius:99px;font-size:12.5px;
 color:var(--soft);background:var(--card);margin-left:8px;vertical-align:2px;white-space:nowrap}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:7px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(142px,1fr));gap:12px;margin-top:20px}
.figure,.card{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.figure{padding:12px 15px}
.figure b{display:block;
 font-size:25px;line-height:1.25;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.figure span{display:block;color:var(--soft);font-size:12.5px}.figure span.faint{color:var(--faint)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,470px),1fr));gap:14px}
.card{padding:13px 15px 10px;min-width:0}
.card>header{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;margin-bottom:6px}
.card>header h3{margin-right:auto}
.legend{display:flex;flex-wrap:wrap;gap:0 13px;font-size:12.5px;color:var(--soft)}
.legend svg{width:22px;height:8px;margin-right:5px;vertical-align:1px}
svg.chart,svg.heat{display:block;width:100%;height:auto}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg .tick{fill:var(--faint);font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--grid)}
svg .axis{stroke:var(--rule)}svg .cursor{stroke:var(--faint);stroke-dasharray:2 3}
svg line.reference{stroke:var(--soft);stroke-dasharray:5 4}svg text.reference{fill:var(--soft)}
svg text.broken{fill:var(--warn);font-size:15px;font-weight:700;cursor:help}
path{fill:none;stroke-linejoin:round;stroke-linecap:round}
path.line{stroke-width:1.8}path.raw{stroke-width:1;opacity:.3}
.d1{stroke-dasharray:7 4}.d2{stroke-dasharray:2 4}.d3{stroke-dasharray:9 3 2 3}path.raw{stroke-dasharray:none}
circle{stroke:var(--card);stroke-width:1.2}
.scale{font-size:12.5px;color:var(--soft);white-space:nowrap}
.scale i{display:inline-block;width:9px;height:9px}
.tip{position:fixed;pointer-events:none;background:var(--card);border:1px solid var(--rule);border-radius:7px;
 padding:6px 10px;font-size:12.5px;box-shadow:0 3px 14px #0003;z-index:2;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:break-word}
th{white-space:nowrap}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap;padding-right:26px}td:last-child,th:last-child{padding-right:0}
td.key{color:var(--soft);white-space:nowrap}.flat td.key{width:190px}
.share{display:inline-block;height:9px;border-radius:2px;background:var(--c0);min-width:1px;vertical-align:0}
.scroll{overflow-x:auto}
details{background:var(--card);border:1px solid var(--rule);border-radius:10px;margin-top:10px}
summary{cursor:pointer;padding:10px 15px;font-weight:600;font-size:14px}
details>div{padding:0 15px 13px}
details details{border:0;margin:0}details details summary{padding:6px 0}details details>div{padding:0}
pre{margin:0;overflow-x:auto;line-height:1.5}
.sample{padding:10px 0;border-bottom:1px solid var(--rule)}.sample:last-child{border:0}
.sample pre{white-space:pre-wrap;overflow-wrap:anywhere}.sample .prompt{color:var(--faint)}
footer{margin-top:40px;color:var(--faint);font-size:12.5px}
@media print{body{background:#fff}.card,.figure{break-inside:avoid}}
"""
    + "".join(
        f".c{i}{{stroke:var(--c{i})}}circle.c{i},.dot.c{i}{{fill:var(--c{i});background:var(--c{i});stroke:var(--card)}}"
        for i in range(8)
    )
    + "".join(f"rect.h{i}{{fill:var(--h{i})}}i.h{i}{{background:var(--h{i})}}" for i in range(12))
)

# The page is complete without this: it only shows values under the pointer.
SCRIPT = """
(function(){
var tip=document.createElement('div');tip.className='tip';tip.hidden=true;document.body.appendChild(tip);
function show(v){var a=Math.abs(v);
 return a&&(a<.001||a>=1e5)?v.toExponential(2):v.toPrecision(4).replace(/\\.?0+$/,'')}
document.querySelectorAll('svg.chart').forEach(function(svg){
 var d=svg.dataset,box=svg.viewBox.baseVal,L=%(left)d,R=%(right)d,T=%(top)d,B=%(bottom)d;
 var lines=[].map.call(svg.querySelectorAll('path.line'),function(p){
  var nums=(p.getAttribute('d').match(/[-\\d.]+/g)||[]).map(Number),pts=[];
  for(var i=0;i+1<nums.length;i+=2)pts.push([nums[i],nums[i+1]]);
  return {label:p.dataset.label,stroke:getComputedStyle(p).stroke,pts:pts}});
 var cursor=document.createElementNS('http://www.w3.org/2000/svg','line');
 cursor.setAttribute('class','cursor');cursor.setAttribute('y1',T);cursor.setAttribute('y2',box.height-B);
 svg.appendChild(cursor);cursor.style.display='none';
 svg.addEventListener('mousemove',function(e){
  var r=svg.getBoundingClientRect(),x=(e.clientX-r.left)*box.width/r.width,best=null;
  lines.forEach(function(l){l.hit=null;l.pts.forEach(function(p){
   if(!l.hit||Math.abs(p[0]-x)<Math.abs(l.hit[0]-x))l.hit=p});
   if(l.hit&&(!best||Math.abs(l.hit[0]-x)<Math.abs(best[0]-x)))best=l.hit});
  if(!best)return;
  tip.textContent='';
  var head=document.createElement('div');
  head.textContent='step '+Math.round(+d.x0+(best[0]-L)/(box.width-L-R)*(d.x1-d.x0)).toLocaleString('en');
  tip.appendChild(head);
  lines.forEach(function(l){if(!l.hit||Math.abs(l.hit[0]-best[0])>12)return;
   var v=d.high-(l.hit[1]-T)/(box.height-T-B)*(d.high-d.low);if(+d.log)v=Math.pow(10,v);
   var row=document.createElement('div'),dot=document.createElement('span');
   dot.className='dot';dot.style.background=l.stroke;row.appendChild(dot);
   row.appendChild(document.createTextNode(l.label+'  '+show(v)));tip.appendChild(row)});
  cursor.style.display='';cursor.setAttribute('x1',best[0]);cursor.setAttribute('x2',best[0]);
  tip.hidden=false;var w=tip.offsetWidth;
  tip.style.left=Math.min(e.clientX+14,innerWidth-w-8)+'px';tip.style.top=(e.clientY+14)+'px'});
 svg.addEventListener('mouseleave',function(){tip.hidden=true;cursor.style.display='none'});
});})();
"""
