function show(v,name){if(!isFinite(v))return'n/a';if(name.endsWith('bytes')){const u=['B','kB','MB','GB','TB','PB','EB'];let i=0;
while(Math.abs(v)>=1000&&i<6){v/=1000;i++}return v.toPrecision(4).replace(/\.?0+$/,'')+' '+u[i]}
return Math.abs(v)>=1e5?v.toLocaleString('en',{maximumSignificantDigits:4}):String(+v.toPrecision(4))}
function from(s,p){let v=s.log?Math.exp(Math.log(s.low)+p/1000*(Math.log(s.high)-Math.log(s.low))):s.low+p/1000*(s.high-s.low);
return s.whole?Math.round(v):+v.toPrecision(3)}
function place(s,v){return Math.round(1000*(s.log?(Math.log(v)-Math.log(s.low))/(Math.log(s.high)-Math.log(s.low)):(v-s.low)/(s.high-s.low)))}
function calculate(f,values){return FORMULAS[f](...Object.values(values))}
if(typeof document!=='undefined')for(const[f,spec]of Object.entries(SPECS)){const box=document.getElementById(f),values={};
const draw=()=>{const out=calculate(f,values),rows=box.querySelectorAll('[data-out]');const most={};
for(const[k,v]of Object.entries(out)){const kind=k.split(' ').pop();most[kind]=Math.max(most[kind]||0,v)}
for(const r of rows){const k=r.dataset.out,v=out[k];r.querySelector('output').textContent=show(v,k);
r.querySelector('i').style.width=(100*v/(most[k.split(' ').pop()]||1)).toFixed(1)+'%'}};
for(const[name,s]of Object.entries(spec)){values[name]=s.value;const row=box.querySelector(`[data-in="${name}"]`),
slide=row.querySelector('[type=range]'),type=row.querySelector('[type=number]');
const set=v=>{values[name]=v;type.value=v;slide.value=place(s,Math.max(v,s.low));draw()};row.set=set;
slide.addEventListener('input',()=>set(from(s,+slide.value)));
type.addEventListener('input',()=>{const v=+type.value;if(type.value!==''&&v>=s.low&&v<=s.high){values[name]=v;slide.value=place(s,v);draw()}});}
for(const b of box.querySelectorAll('button'))b.addEventListener('click',()=>{
for(const[k,v]of Object.entries({...Object.fromEntries(Object.entries(spec).map(([k,s])=>[k,s.value])),...JSON.parse(b.dataset.set)}))
box.querySelector(`[data-in="${k}"]`).set(v)});
for(const[name,s]of Object.entries(spec))box.querySelector(`[data-in="${name}"]`).set(s.value)}
