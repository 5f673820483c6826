"use strict";
// The timeline of a page: streams as lanes, operations as boxes; what is narrower than a pixel is drawn together.
// No framework and no library: the page must work offline, and a canvas of this size needs neither.
(function () {
  const source = document.getElementById("timeline-data");
  const canvas = document.getElementById("timeline");
  if (!source || !canvas) return;
  const data = JSON.parse(source.textContent);
  const holder = document.getElementById("lanes");
  const spacer = document.getElementById("lanes-spacer");
  const tip = document.getElementById("tip");
  const status = document.getElementById("timeline-status");
  const spoken = document.getElementById("timeline-selected");
  const rankSelect = document.getElementById("timeline-rank");
  const LANE = 24, AXIS = 24, MIN_VIEW_NS = 50, WIDE = 4;
  const COLOURS = { compute: "#1f5a8a", comm: "#e08a1e", copy: "#7a9e7e", other: "#a58bb5" };
  const INK = { compute: "#ffffff", comm: "#000000", copy: "#000000", other: "#000000" };
  const context = canvas.getContext("2d");

  function decode(text, Type) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Type(bytes.buffer);
  }

  const all = data.lanes.map((lane) => {
    const start = decode(lane.start, Float64Array), duration = decode(lane.duration, Float64Array);
    const end = new Float64Array(start.length), reach = new Float64Array(start.length);
    const count = lane.count ? decode(lane.count, Int32Array) : null;
    let latest = -Infinity, total = 0;
    for (let i = 0; i < start.length; i++) {
      end[i] = start[i] + duration[i];
      latest = Math.max(latest, end[i]);
      reach[i] = latest;  // never falls, so that a search finds the first operation that reaches into a view
      total += count ? count[i] : 1;
    }
    return { rank: lane.rank, context: lane.context, stream: lane.stream, start, end, reach, count, total,
             name: decode(lane.name, Int32Array), role: decode(lane.role, Uint8Array) };
  });
  let lanes = all;
  let view = [0, data.extent];
  let selected = null;  // {lane, index}
  let marked = -1;      // lane under the keyboard
  let scheduled = false;
  let patterns = {};

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const grouped = (n) => Math.round(n).toLocaleString("en-US");
  const gutter = () => (canvas.clientWidth < 600 ? 64 : 104);
  const plotWidth = () => Math.max(40, canvas.clientWidth - gutter());

  function duration(ns) {
    const size = Math.abs(ns);
    if (size >= 1e9) return (ns / 1e9).toFixed(3) + " s";
    if (size >= 1e6) return (ns / 1e6).toFixed(3) + " ms";
    if (size >= 1e3) return (ns / 1e3).toFixed(2) + " us";
    return Math.round(ns) + " ns";
  }

  // First index whose value is above x, in an array that never falls.
  function firstAbove(values, x) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > x) high = middle; else low = middle + 1;
    }
    return low;
  }

  function makePatterns() {
    patterns = {};
    const drawings = {
      comm: (c) => { c.moveTo(0, 8); c.lineTo(8, 0); c.moveTo(-2, 2); c.lineTo(2, -2); c.moveTo(6, 10); c.lineTo(10, 6); },
      copy: (c) => { c.moveTo(0, 4); c.lineTo(8, 4); },
      other: (c) => { c.rect(3, 3, 1, 1); },
    };
    for (const role of Object.keys(drawings)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const c = tile.getContext("2d");
      c.fillStyle = COLOURS[role];
      c.fillRect(0, 0, 8, 8);
      c.strokeStyle = "rgba(0,0,0,0.45)";
      c.beginPath(); drawings[role](c); c.stroke();
      patterns[role] = context.createPattern(tile, "repeat");
    }
  }

  function ticks(from, to, room) {
    const rough = (to - from) / Math.max(2, Math.floor(room / 110));
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const marks = [];
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) marks.push(t);
    return marks;
  }

  function resize() {
    const ratio = window.devicePixelRatio || 1;
    const height = Math.min(AXIS + lanes.length * LANE + 6, Math.max(180, Math.floor(window.innerHeight * 0.6)));
    spacer.style.height = Math.max(0, AXIS + lanes.length * LANE + 6 - height) + "px";
    canvas.style.height = height + "px";
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  function draw() {
    scheduled = false;
    const width = canvas.clientWidth, height = canvas.clientHeight, left = gutter(), room = plotWidth();
    const line = css("--line"), fg = css("--fg"), muted = css("--muted"), background = css("--bg");
    const scale = room / (view[1] - view[0]);
    context.fillStyle = background;
    context.fillRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const totals = { inView: 0, merged: 0, all: 0, drawn: 0 };
    const first = Math.floor(holder.scrollTop / LANE);
    context.save();
    context.beginPath(); context.rect(0, AXIS, width, height - AXIS); context.clip();
    for (let i = 0; i < lanes.length; i++) {
      totals.all += lanes[i].total;
      const y = AXIS + i * LANE - holder.scrollTop;
      if (i < first || y > height) { countLane(lanes[i], totals); continue; }
      drawLane(lanes[i], i, y, left, room, scale, totals, { line, fg, muted });
    }
    context.restore();
    drawAxis(left, room, scale, width, { line, fg, muted });
    drawSelected(left, scale, fg);
    say(totals);
  }

  function countLane(lane, totals) {
    for (let i = firstAbove(lane.reach, view[0]); i < lane.start.length && lane.start[i] < view[1]; i++)
      totals.inView += lane.count ? lane.count[i] : 1;
  }

  function drawLane(lane, number, y, left, room, scale, totals, colours) {
    const isFirstOfRank = number === 0 || lanes[number - 1].rank !== lane.rank;
    context.fillStyle = colours.line;
    context.fillRect(0, y, canvas.clientWidth, isFirstOfRank ? 1.5 : 0.5);
    context.fillStyle = number === marked ? colours.fg : colours.muted;
    const label = left < 100 ? "r" + lane.rank + " s" + lane.stream : "rank " + lane.rank + "  s" + lane.stream;
    context.fillText((number === marked ? "\u25b8" : "") + label, 4, y + LANE / 2, left - 8);
    context.save();
    context.beginPath(); context.rect(left, y, room, LANE); context.clip();
    drawSteps(lane.rank, y, left, scale, colours);
    drawOps(lane, y + 3, LANE - 6, left, scale, totals);
    context.restore();
  }

  function drawSteps(rank, y, left, scale, colours) {
    context.strokeStyle = colours.muted;
    context.globalAlpha = 0.6;
    context.setLineDash([2, 2]);
    context.beginPath();
    for (const [of, , start, end] of data.steps) {
      if (of !== rank || end < view[0] || start > view[1]) continue;
      for (const at of [start, end]) {
        const x = Math.round(left + (at - view[0]) * scale) + 0.5;
        context.moveTo(x, y); context.lineTo(x, y + LANE);
      }
    }
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  function drawOps(lane, y, height, left, scale, totals) {
    const { start, end, role, count } = lane;
    const busy = new Float64Array(data.roles.length);
    let pixel = -1, covered = 0;
    const flush = () => {
      if (pixel < 0) return;
      let main = 0;
      for (let r = 1; r < busy.length; r++) if (busy[r] > busy[main]) main = r;
      context.globalAlpha = 0.4 + 0.6 * Math.min(1, covered * scale);
      context.fillStyle = COLOURS[data.roles[main]];
      context.fillRect(left + pixel, y, 1, height);
      context.globalAlpha = 1;
      busy.fill(0); covered = 0; pixel = -1;
      totals.drawn++;
    };
    for (let i = firstAbove(lane.reach, view[0]); i < start.length && start[i] < view[1]; i++) {
      const n = count ? count[i] : 1;
      if (end[i] <= view[0]) continue;
      totals.inView += n;
      const x = (start[i] - view[0]) * scale, wide = (end[i] - start[i]) * scale;
      if (wide < 1) {
        const at = Math.max(0, Math.floor(x));
        if (at !== pixel) flush();
        pixel = at;
        busy[role[i]] += end[i] - start[i];
        covered += end[i] - start[i];
        totals.merged += n;
        continue;
      }
      flush();
      if (n > 1) totals.merged += n;
      drawBox(lane, i, left + Math.max(x, -20), y, wide + Math.min(0, x + 20), height, left);
      totals.drawn++;
    }
    flush();
  }

  function drawBox(lane, i, x, y, wide, height, left) {
    const name = data.roles[lane.role[i]];
    const shown = Math.min(wide, canvas.clientWidth + 40);
    const gap = wide > WIDE ? 1 : 0;
    context.fillStyle = wide > WIDE && patterns[name] ? patterns[name] : COLOURS[name];
    context.fillRect(x, y, Math.max(1, shown - gap), height);
    if (shown < 44) return;
    const text = label(lane, i), from = Math.max(x, left) + 4, space = x + shown - from - 6;
    if (space < 30) return;
    context.save();
    context.beginPath(); context.rect(from - 2, y, space + 4, height); context.clip();
    if (patterns[name]) {  // a plain ground, so that the letters stand out from the pattern
      context.fillStyle = COLOURS[name];
      context.fillRect(from - 2, y + 2, Math.min(space + 2, context.measureText(text).width + 5), height - 4);
    }
    context.fillStyle = INK[name];
    context.fillText(text, from, y + height / 2 + 0.5);
    context.restore();
  }

  const label = (lane, i) => (lane.name[i] < 0 ? grouped(lane.count[i]) + " operations" : data.names[lane.name[i]]);

  function drawAxis(left, room, scale, width, colours) {
    context.fillStyle = css("--bg");
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = colours.muted;
    context.strokeStyle = colours.line;
    context.beginPath();
    for (const t of ticks(view[0], view[1], room)) {
      const x = left + (t - view[0]) * scale;
      context.moveTo(x + 0.5, AXIS - 6); context.lineTo(x + 0.5, AXIS);
      const text = duration(t).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
      if (x + context.measureText(text).width + 3 < width) context.fillText(text, x + 3, AXIS / 2 - 1);
    }
    context.moveTo(0, AXIS - 0.5); context.lineTo(width, AXIS - 0.5);
    context.stroke();
  }

  function drawSelected(left, scale, colour) {
    if (!selected) return;
    const number = lanes.indexOf(selected.lane);
    if (number < 0) return;
    const { lane, index } = selected;
    const x = left + (lane.start[index] - view[0]) * scale, wide = (lane.end[index] - lane.start[index]) * scale;
    const y = AXIS + number * LANE - holder.scrollTop;
    if (x > canvas.clientWidth || x + wide < left || y < AXIS - LANE) return;
    context.strokeStyle = colour;
    context.lineWidth = 2.5;
    const from = Math.max(left, x - 2);
    context.strokeRect(from, y + 1.5, Math.max(4, Math.min(x + wide, canvas.clientWidth) - from + 2), LANE - 3);
    context.lineWidth = 1;
  }

  function say(totals) {
    const offScreen = totals.all - totals.inView;
    const parts = [
      "In view: " + duration(view[1] - view[0]) + " of " + duration(data.extent) + ", " +
        grouped(totals.inView) + " of " + grouped(totals.all) + " operations",
    ];
    if (totals.merged) parts.push(grouped(totals.merged) + " of them are drawn together, as they are narrower than a pixel (zoom in)");
    if (offScreen) parts.push(grouped(offScreen) + " are off screen");
    if (data.mergedBelow) parts.push("in this page, neighbours shorter than " + duration(data.mergedBelow) + " are one box");
    status.textContent = parts.join("; ") + ".";
    Object.assign(canvas.dataset, {
      from: view[0], to: view[1], inView: totals.inView, merged: totals.merged, all: totals.all, drawn: totals.drawn,
    });
  }

  function schedule() {
    if (!scheduled) { scheduled = true; requestAnimationFrame(draw); }
  }

  function show(from, to) {
    const length = Math.min(Math.max(to - from, MIN_VIEW_NS), data.extent);
    from = Math.min(Math.max(from, 0), data.extent - length);
    view = [from, from + length];
    schedule();
  }

  function zoom(factor, at) {
    const middle = at === undefined ? (view[0] + view[1]) / 2 : at;
    show(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  }
  const pan = (part) => show(view[0] + part * (view[1] - view[0]), view[1] + part * (view[1] - view[0]));

  // ---- pointer
  function placeOf(event) {
    const box = canvas.getBoundingClientRect(), left = gutter();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const number = Math.floor((y - AXIS + holder.scrollTop) / LANE);
    return { x, ns: view[0] + ((x - left) / plotWidth()) * (view[1] - view[0]),
             lane: y >= AXIS && x >= left ? lanes[number] : undefined };
  }

  function opAt(lane, ns) {
    const half = 1.5 * (view[1] - view[0]) / plotWidth();
    let best = -1, far = Infinity;
    for (let i = firstAbove(lane.reach, ns - half); i < lane.start.length && lane.start[i] <= ns + half; i++) {
      const away = Math.max(0, lane.start[i] - ns, ns - lane.end[i]);
      if (away < far || (away === far && lane.end[i] - lane.start[i] < lane.end[best] - lane.start[best])) { best = i; far = away; }
    }
    return best;
  }

  function describe(lane, i) {
    const name = lane.name[i] < 0 ? grouped(lane.count[i]) + " operations" : data.fullNames[lane.name[i]];
    return name + "\n" + data.roles[lane.role[i]] + ", " + duration(lane.end[i] - lane.start[i]) +
      "\nrank " + lane.rank + ", stream " + lane.stream + " (context " + lane.context + ")" +
      "\nfrom " + duration(lane.start[i]) + " of this timeline, " + (BigInt(data.origin) + BigInt(Math.round(lane.start[i]))).toLocaleString("en-US") + " ns of the trace";
  }

  function hover(event) {
    const { lane, ns } = placeOf(event);
    const i = lane ? opAt(lane, ns) : -1;
    if (i < 0) { tip.hidden = true; return; }
    const pixel = (view[1] - view[0]) / plotWidth();
    let text = describe(lane, i);
    if (lane.end[i] - lane.start[i] < pixel) {
      let n = 0;
      for (let k = firstAbove(lane.reach, ns - pixel); k < lane.start.length && lane.start[k] <= ns + pixel; k++) n += lane.count ? lane.count[k] : 1;
      if (n > 1) text += "\none of " + grouped(n) + " operations within two pixels: zoom in";
    }
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - box.width - 6)) + "px";
    tip.style.top = (event.clientY + 18 + box.height > window.innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
  }

  const pointers = new Map();
  let moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    moved = false;
    tip.hidden = true;
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) { hover(event); return; }
    const before = pointers.get(event.pointerId), perPixel = (view[1] - view[0]) / plotWidth();
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const old = Math.abs(before - other), now = Math.abs(event.clientX - other);
      if (old > 8 && now > 8) zoom(old / now, placeOf({ clientX: other, clientY: event.clientY }).ns);
    } else {
      show(view[0] - (event.clientX - before) * perPixel, view[1] - (event.clientX - before) * perPixel);
    }
    if (Math.abs(event.clientX - before) > 1) moved = true;
    pointers.set(event.pointerId, event.clientX);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", (event) => {
    release(event);
    if (moved) return;
    const { lane, ns } = placeOf(event);
    const index = lane ? opAt(lane, ns) : -1;
    select(index < 0 ? null : { lane, index });
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, placeOf(event).ns));
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey)) {
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan(event.deltaX / plotWidth()); }
      return;
    }
    event.preventDefault();
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 120), placeOf(event).ns);
  }, { passive: false });

  // ---- keyboard
  function select(what) {
    selected = what;
    marked = what ? lanes.indexOf(what.lane) : marked;
    spoken.textContent = what ? describe(what.lane, what.index).replace(/\n/g, "; ") : "";
    schedule();
  }

  function reveal(lane) {
    const y = lanes.indexOf(lane) * LANE, seen = canvas.clientHeight - AXIS;
    if (y < holder.scrollTop) holder.scrollTop = y;
    if (y + LANE > holder.scrollTop + seen) holder.scrollTop = y + LANE - seen;
  }

  function toLane(number) {
    if (!lanes.length) return;
    marked = Math.min(Math.max(number, 0), lanes.length - 1);
    const lane = lanes[marked], index = Math.min(firstAbove(lane.reach, view[0]), lane.start.length - 1);
    reveal(lane);
    select({ lane, index });
  }

  function toOp(by) {
    if (!selected) { toLane(Math.max(marked, 0)); return; }
    const { lane, index } = selected, next = Math.min(Math.max(index + by, 0), lane.start.length - 1);
    select({ lane, index: next });
    const length = view[1] - view[0];
    if (lane.start[next] < view[0] || lane.end[next] > view[1]) show(lane.start[next] - length / 4, lane.start[next] + (3 * length) / 4);
  }

  function zoomToSelected() {
    if (!selected) return;
    const { lane, index } = selected, length = Math.max(lane.end[index] - lane.start[index], 20);
    show(lane.start[index] - 2 * length, lane.end[index] + 2 * length);
  }

  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    Home: () => show(0, data.extent), ArrowUp: () => toLane(marked - 1), ArrowDown: () => toLane(marked + 1),
    n: () => toOp(1), p: () => toOp(-1), Enter: zoomToSelected, Escape: () => { tip.hidden = true; select(null); },
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  // ---- controls
  const onClick = (id, action) => document.getElementById(id).addEventListener("click", action);
  onClick("zoom-in", () => zoom(0.5));
  onClick("zoom-out", () => zoom(2));
  onClick("zoom-all", () => show(0, data.extent));
  onClick("pan-left", () => pan(-0.4));
  onClick("pan-right", () => pan(0.4));
  rankSelect.addEventListener("change", () => choose(rankSelect.value));

  function choose(rank) {
    rankSelect.value = rank;
    lanes = rank === "all" ? all : all.filter((lane) => String(lane.rank) === rank);
    holder.scrollTop = 0;
    marked = selected ? lanes.indexOf(selected.lane) : -1;
    resize();
    draw();
  }

  for (const button of document.querySelectorAll("button[data-start]")) {
    button.addEventListener("click", () => {
      const rank = Number(button.dataset.rank), stream = Number(button.dataset.stream);
      const start = Number(BigInt(button.dataset.start) - BigInt(data.origin));
      const lane = all.find((each) => each.rank === rank && each.stream === stream &&
        each.start[opIndex(each, start)] <= start && each.end[opIndex(each, start)] >= start);
      if (!lane) { status.textContent = "This operation is not in the timeline."; return; }
      if (!lanes.includes(lane)) choose("all");
      select({ lane, index: opIndex(lane, start) });
      reveal(lane);
      zoomToSelected();
      document.getElementById("timeline-section").scrollIntoView();
      canvas.focus({ preventScroll: true });
    });
  }

  function opIndex(lane, start) {
    return Math.max(0, firstAbove(lane.start, start) - 1);
  }

  holder.addEventListener("scroll", schedule);
  window.addEventListener("resize", () => { resize(); schedule(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
  window.addEventListener("beforeprint", draw);
  makePatterns();
  choose("all");
})();
