"use strict";
/* Draws a timeline into a canvas, with its memory below: what is in view only, and shares of time where boxes would be
   too narrow. Pages of zbpipe include this file; `drawing` in html.py makes what it draws. */

// CSS pixels.
const AXIS = 26, HEADING = 34, STRIP = 3, NARROW = 560, LEAST_BOX = 2, SEAM = 1, HATCH = 6, STRIPE = 2;
const FONT = 'Helvetica, Arial, "DejaVu Sans", sans-serif';

const part = (id) => document.getElementById(id);
const show = (value) => String(+value.toPrecision(6));
const inRange = (value, low, high) => Math.max(Math.min(value, high), low);

/* The object that `pack` in html.py has put into base64. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text());
}

/* A list of ops with times in seconds, from whole ticks between them. */
function readOps({gap, length, kind, stage, microbatch}, data) {
  const start = new Float64Array(kind.length), end = new Float64Array(kind.length), look = new Uint16Array(kind.length);
  for (let n = 0, now = 0; n < kind.length; n++) {
    start[n] = (now += gap[n]) * data.tick;
    end[n] = (now += length[n]) * data.tick;
    look[n] = kind[n] * data.stagesPerRank + data.nthStage[stage[n]];
  }
  return {kind, stage, microbatch, start, end, look, size: kind.length};
}

/* What a rank holds: from when on, how much. Of several changes at one moment only the outcome is to be seen. */
function readMemory({ops, lanes}, data) {
  const changes = (list, sign) => {
    const found = [];
    for (let n = 0; n < list.size; n++) {
      const [taken, freed] = data.changes[list.kind[n]][list.stage[n]];
      if (taken && sign >= 0) found.push([list.start[n], taken]);
      if (freed && sign <= 0) found.push([list.end[n], -freed]);
    }
    return found;
  };
  // The sort keeps the order of what happens at one time: room is made before it is taken.
  const all = [...lanes.flatMap((lane) => changes(lane, -1)), ...changes(ops, 0), ...lanes.flatMap((lane) => changes(lane, 1))];
  if (lanes.length) all.sort(([one], [other]) => one - other);
  const times = [0], held = [0];
  for (const [time, change] of all) {
    const now = held[held.length - 1] + change;
    if (time === times[times.length - 1]) held[held.length - 1] = now; else { times.push(time); held.push(now); }
  }
  return {times, held};
}

function readTimeline(data) {
  const ranks = data.ranks.map(({peak, ops, lanes}) => {
    const read = {peak, ops: readOps(ops, data), lanes: lanes.map((lane) => readOps(lane, data))};
    return {...read, memory: readMemory(read, data)};
  });
  const path = data.criticalPath.map(([rank, n]) => ({rank, n}));
  const onPath = ranks.map(({ops}) => new Uint8Array(ops.size));
  for (const {rank, n} of path) onPath[rank][n] = 1;
  return {...data, ranks, path, onPath, until: data.makespan || 1, highest: Math.max(...ranks.map(({peak}) => peak), 1e-9)};
}

/* Index of the last of the ascending `values` that is not above `limit`; -1 if there is none. */
function lastUpTo(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const rgb = (colour) => [1, 3, 5].map((n) => parseInt(colour.slice(n, n + 2), 16));
/* As the bytes of an image, on machines that put the low byte first: all that browsers run on. */
const pixel = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
const mixed = (one, other, share) => rgb(one).map((part, n) => Math.round(part * share + rgb(other)[n] * (1 - share)));

/* The colours of the page, light or dark. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ink", "faint", "line", "panel", "curve", "path", "idle", "stripe"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

class Picture {
  /* `canvas` sticks inside `room`, which is as high as all that there is to draw; `tip` shows what is pointed at, `said`
     tells it to screen readers, `looked` hears of every new view, and `memory` is whether to draw it. */
  constructor({canvas, room, tip, said, looked = () => {}, memory = true}) {
    Object.assign(this, {canvas, room, tip, said, looked, memory, pen: canvas.getContext("2d"), image: null, dim: false, chosen: null});
    this.fingers = new Map();
    this.listen();
  }

  show(data, until = 0) {
    this.timeline = readTimeline(data);
    this.until = until || this.timeline.until;
    this.view = {begin: 0, end: this.until};
    this.chosen = null;
    const many = this.timeline.ranks.length;
    [this.row, this.box, this.curve, this.gap] = many <= 16 ? [32, 26, 46, 12] : many <= 32 ? [22, 18, 28, 8] : [15, 12, 18, 5];
    this.gridHeight = many * this.row;
    this.height = this.gridHeight + (this.memory ? HEADING + many * (this.curve + this.gap) : 0) + AXIS;
    this.ask();
  }

  ask() {
    if (!this.asked) this.asked = requestAnimationFrame(() => { this.asked = 0; this.draw(); });
  }

  get plotWidth() { return Math.max(this.width - this.left - this.right, 50); }
  get scale() { return this.plotWidth / (this.view.end - this.view.begin); }
  toX(time) { return this.left + (time - this.view.begin) * this.scale; }
  toTime(x) { return this.view.begin + (x - this.left) / this.scale; }
  rowTop(rank) { return rank * this.row - this.top; }
  curveBottom(rank) { return this.gridHeight + HEADING + (rank + 1) * this.curve + rank * this.gap - this.top; }

  /* The size of the canvas, and how far it is scrolled. */
  measure() {
    const above = parseFloat(getComputedStyle(this.canvas).top) || 0;
    this.room.style.height = `${this.height}px`;
    this.width = this.canvas.clientWidth;
    const {top} = this.room.getBoundingClientRect();
    // Down to the end of the window, so that the axis is in sight.
    this.seen = Math.min(this.height, Math.max(window.innerHeight - Math.max(above, top) - 8, 160));
    this.top = inRange(above - top, 0, this.height - this.seen);
    [this.left, this.right] = this.width < NARROW ? [28, 10] : [64, 76];
    this.ratio = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(this.width * this.ratio), Math.round(this.seen * this.ratio)];
    this.canvas.style.height = `${this.seen}px`;
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, {width: wide, height: high});
  }

  draw() {
    const {pen} = this;
    this.measure();
    this.theme = readTheme();
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.fillStyle = this.theme.paper;
    pen.fillRect(0, 0, this.width, this.seen);
    const rows = this.inView((rank) => this.rowTop(rank), this.row);
    const curves = this.memory ? this.inView((rank) => this.curveBottom(rank) - this.curve, this.curve) : [];
    this.paint(rows, curves);
    for (const rank of rows) this.write(this.name(rank), this.left - 6, this.rowTop(rank) + this.box / 2, this.theme.ink, "right");
    for (const rank of curves) this.label(rank);
    if (this.memory) this.head(this.gridHeight + HEADING - 16 - this.top);
    this.clipped(() => {
      for (const rank of rows) this.number(rank);
      if (this.dim) this.drawPath();
      if (this.chosen) this.frame(this.chosen);
    });
    this.axis();
    this.looked(this);
  }

  head(y) {
    this.write("Activations held", this.left, y, this.theme.ink, "left", "bold 13px");
    if (this.width >= NARROW) this.write(`(${this.timeline.unitOfActivations})`, this.left + 118, y, this.theme.faint);
  }

  inView(top, height) {
    const found = [];
    for (let rank = 0; rank < this.timeline.ranks.length; rank++) {
      if (top(rank) + height > 0 && top(rank) < this.seen - AXIS) found.push(rank);
    }
    return found;
  }

  clipped(paint) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(this.left, 0, this.plotWidth, this.seen - AXIS);
    this.pen.clip();
    paint();
    this.pen.restore();
  }

  write(text, x, y, colour, align = "left", font = this.row < 20 ? "10px" : "12px") {
    Object.assign(this.pen, {font: `${font} ${FONT}`, fillStyle: colour, textAlign: align, textBaseline: "middle"});
    this.pen.fillText(text, x, y);
  }

  name(rank) { return this.width < NARROW ? String(rank) : `rank ${rank}`; }

  label(rank) {
    const {peak} = this.timeline.ranks[rank], y = this.curveBottom(rank) - this.curve * peak / this.timeline.highest;
    this.write(this.name(rank), this.left - 6, this.curveBottom(rank) - this.curve / 2, this.theme.ink, "right");
    if (this.width >= NARROW) this.write(`peak ${+peak.toPrecision(4)}`, this.width - this.right + 8, Math.max(y, 6), this.theme.faint);
  }

  /* Boxes, bubbles and curves, pixel by pixel into one image: many thousands at once are too many for the pen. */
  paint(rows, curves) {
    const {ratio, theme, timeline} = this;
    const wide = Math.round(this.plotWidth * ratio), high = Math.round((this.seen - AXIS) * ratio);
    if (!this.image || this.image.width !== wide || this.image.height !== high) this.image = this.pen.createImageData(wide, high);
    const to = {pixels: new Uint32Array(this.image.data.buffer), wide, high, line: new Uint32Array(wide)};
    to.paper = pixel(rgb(theme.paper));
    to.pixels.fill(to.paper);
    to.colours = timeline.paints.flat().map(([fill]) => pixel(rgb(fill)));
    to.dimmed = this.dim ? timeline.paints.flat().map(([fill]) => pixel(mixed(fill, theme.paper, 0.25))) : to.colours;
    [to.idle, to.stripe] = [pixel(rgb(theme.idle)), pixel(rgb(theme.stripe))];
    to.begin = inRange(Math.round((0 - this.view.begin) * this.scale * ratio), 0, wide);
    to.end = inRange(Math.round((timeline.makespan - this.view.begin) * this.scale * ratio), 0, wide);
    for (const rank of rows) this.paintRow(rank, to);
    for (const rank of curves) this.paintCurve(rank, to);
    this.pen.putImageData(this.image, Math.round(this.left * ratio), 0);
  }

  paintRow(rank, to) {
    const {ops, lanes} = this.timeline.ranks[rank], {ratio} = this, top = Math.round(this.rowTop(rank) * ratio);
    const columns = Math.ceil(to.wide / (LEAST_BOX * ratio)), of = to.colours.length;
    to.line.fill(to.paper);
    to.line.fill(0, to.begin, to.end);
    const shares = new Float32Array(columns * of), used = new Uint8Array(columns);
    this.paintOps(ops, this.dim ? this.timeline.onPath[rank] : null, to, (look, begin, end) => {
      for (let column = Math.max(Math.floor(begin), 0); column < Math.min(end, columns); column++) {
        shares[column * of + look] += Math.min(end, column + 1) - Math.max(begin, column);
        used[column] = 1;
      }
    });
    this.copyLine(to, top, Math.round(this.box * ratio));
    this.fillIdle(to, top, Math.round(this.box * ratio), shares, used);
    lanes.forEach((lane, n) => {
      to.line.fill(to.paper);
      this.paintOps(lane, null, to, (look, begin, end) => {
        to.line.fill(to.colours[look], Math.max(Math.floor(begin * LEAST_BOX * ratio), 0), Math.ceil(end * LEAST_BOX * ratio));
      });
      this.copyLine(to, top + Math.round((this.box + n * STRIP) * ratio), Math.round(STRIP * ratio));
    });
  }

  /* Boxes into one line of pixels; `narrow` gets those that are too narrow, in columns of the least width. */
  paintOps(ops, bright, to, narrow) {
    const perSecond = this.scale * this.ratio, least = LEAST_BOX * this.ratio, {begin, end} = this.view;
    for (let n = Math.max(lastUpTo(ops.start, begin), 0); n < ops.size && ops.start[n] < end; n++) {
      const x = (ops.start[n] - begin) * perSecond, until = (ops.end[n] - begin) * perSecond;
      if (until - x < least) { narrow(ops.look[n], x / least, until / least); continue; }
      const [first, last] = [Math.max(Math.round(x), 0), Math.round(until)];
      to.line.fill((bright && !bright[n] ? to.dimmed : to.colours)[ops.look[n]], first, last);
      if (until - x > 2 * least) to.line.fill(to.paper, Math.max(last - Math.round(SEAM * this.ratio), 0), last);
    }
  }

  copyLine(to, top, height) {
    for (let y = Math.max(top, 0); y < Math.min(top + height, to.high); y++) to.pixels.set(to.line, y * to.wide);
  }

  /* What no box covers: the bubble, hatched, and above it the shares of the boxes that are too narrow. */
  fillIdle(to, top, height, shares, used) {
    const {pixels, wide, line} = to, of = to.colours.length, least = LEAST_BOX * this.ratio;
    const period = Math.round(HATCH * this.ratio), stripe = Math.round(STRIPE * this.ratio), scrolled = Math.round(this.top * this.ratio);
    const [low, high] = [Math.max(top, 0), Math.min(top + height, to.high)];
    for (let column = 0; column < used.length; column++) {
      const first = Math.floor(column * least), last = Math.min(Math.floor((column + 1) * least), wide);
      let open = 0;
      for (let x = first; x < last; x++) open += line[x] === 0;
      if (!open) continue;
      const factor = used[column] ? height * (last - first) / open : 0;
      for (let y = low, look = 0, below = top + (factor && shares[column * of] * factor); y < high; y++) {
        while (factor && look < of && y >= below - 0.5) below += shares[column * of + ++look] * factor || 0;
        const box = factor && look < of ? (this.dim ? to.dimmed : to.colours)[look] : 0;
        for (let x = first; x < last; x++) {
          if (line[x] === 0) pixels[y * wide + x] = box || ((x + y + scrolled) % period < stripe ? to.stripe : to.idle);
        }
      }
    }
  }

  paintCurve(rank, to) {
    const {times, held} = this.timeline.ranks[rank].memory, perSecond = this.scale * this.ratio;
    const most = new Float64Array(to.wide);
    for (let n = Math.max(lastUpTo(times, this.view.begin), 0); n < times.length && times[n] < this.view.end; n++) {
      const until = n + 1 < times.length ? times[n + 1] : this.timeline.makespan;
      const last = Math.min((until - this.view.begin) * perSecond, to.wide);
      for (let x = Math.max(Math.floor((times[n] - this.view.begin) * perSecond), 0); x < last; x++) if (held[n] > most[x]) most[x] = held[n];
    }
    const bottom = Math.round(this.curveBottom(rank) * this.ratio), per = this.curve * this.ratio / this.timeline.highest;
    const [line, area] = [pixel(rgb(this.theme.curve)), pixel(mixed(this.theme.curve, this.theme.paper, 0.3))];
    for (let x = to.begin; x < to.end; x++) {
      const top = Math.round(bottom - most[x] * per), edge = top + Math.max(Math.round(this.ratio), 1);
      for (let y = Math.max(top, 0); y < Math.min(Math.max(bottom, edge), to.high); y++) to.pixels[y * to.wide + x] = y < edge ? line : area;
    }
  }

  /* The microbatches on the boxes that are wide enough. */
  number(rank) {
    const {ops} = this.timeline.ranks[rank], {kinds, paints, nthStage} = this.timeline;
    const y = this.rowTop(rank) + this.box / 2 + 1, letter = this.row < 20 ? 6 : 7;
    for (let n = Math.max(lastUpTo(ops.start, this.view.begin), 0); n < ops.size && ops.start[n] < this.view.end; n++) {
      const long = (ops.end[n] - ops.start[n]) * this.scale;
      if (long < letter + 3) continue;
      const label = long > 46 ? `${ops.stage[n]}${kinds[ops.kind[n]][0]}${ops.microbatch[n]}` : String(ops.microbatch[n]);
      if (long < label.length * letter + 3) continue;
      const ink = this.dim && !this.timeline.onPath[rank][n] ? this.theme.ink : paints[ops.kind[n]][nthStage[ops.stage[n]]][1];
      this.write(label, this.toX(ops.start[n]) + long / 2, y, ink, "center");
    }
  }

  drawPath() {
    const {pen} = this, {path, ranks} = this.timeline;
    pen.beginPath();
    path.forEach(({rank, n}, nth) => {
      const {start, end} = ranks[rank].ops, x = this.toX(start[n]), until = this.toX(end[n]), y = this.rowTop(rank);
      if (until > this.left && x < this.left + this.plotWidth) pen.rect(x + 0.5, y + 1, Math.max(until - x - 2, 1), this.box - 2);
      const next = path[nth + 1];
      if (!next || next.rank === rank) return;
      pen.moveTo(until - 1, y + this.box / 2);
      pen.lineTo(this.toX(ranks[next.rank].ops.start[next.n]) + 1, this.rowTop(next.rank) + this.box / 2);
    });
    Object.assign(pen, {strokeStyle: this.theme.path, lineWidth: 2}).stroke();
  }

  frame({rank, n}) {
    const {start, end} = this.timeline.ranks[rank].ops, x = this.toX(start[n]);
    Object.assign(this.pen, {strokeStyle: this.theme.ink, lineWidth: 3});
    this.pen.strokeRect(x, this.rowTop(rank) + 1.5, Math.max(this.toX(end[n]) - x, 3), this.box - 3);
  }

  /* At the bottom of what is seen, wherever the page is scrolled to. */
  axis() {
    const {pen, theme, view} = this, y = this.seen - AXIS;
    const rough = (view.end - view.begin) / Math.max(this.plotWidth / 80, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9)) || 10 * power;
    pen.fillStyle = theme.paper;
    pen.fillRect(0, y, this.width, AXIS);
    pen.fillStyle = theme.line;
    pen.fillRect(this.left, y, this.plotWidth, 1);
    for (let n = Math.ceil(view.begin / step - 1e-9); n * step <= view.end * (1 + 1e-9); n++) {
      pen.fillStyle = theme.line;
      pen.fillRect(this.toX(n * step), y, 1, 5);
      this.write(show(n * step), this.toX(n * step), y + 15, theme.faint, "center", "12px");
    }
    if (this.width >= NARROW) this.write("time", this.width - this.right + 30, y + 15, theme.faint, "left", "12px");
  }

  look(begin, end) {
    const span = inRange(end - begin, this.until / 1e4, this.until);
    begin = inRange(begin, 0, this.until - span);
    this.view = {begin, end: begin + span};
    this.ask();
  }

  zoom(factor, around = (this.view.begin + this.view.end) / 2) {
    this.look(around - (around - this.view.begin) * factor, around + (this.view.end - around) * factor);
  }

  move(share) {
    const shift = share * (this.view.end - this.view.begin);
    this.look(this.view.begin + shift, this.view.end + shift);
  }

  all() { this.look(0, this.until); }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  inPlot(x, y) { return x >= this.left && x <= this.left + this.plotWidth && y < this.seen - AXIS; }

  opAt(x, y) {
    const rank = Math.floor((y + this.top) / this.row);
    if (!this.inPlot(x, y) || rank < 0 || rank >= this.timeline.ranks.length) return null;
    const below = Math.floor((y - this.rowTop(rank) - this.box) / STRIP), {ops, lanes} = this.timeline.ranks[rank];
    const list = below < 0 ? ops : lanes[below];
    if (!list) return null;
    const n = lastUpTo(list.start, this.toTime(x));
    return n >= 0 && this.toTime(x) < list.end[n] ? {rank, n, list} : null;
  }

  words({rank, n, list = this.timeline.ranks[rank].ops}) {
    const {kinds, onPath} = this.timeline, [letter, meaning] = kinds[list.kind[n]];
    const {[n]: stage} = list.stage, {[n]: microbatch} = list.microbatch, {[n]: start} = list.start, {[n]: end} = list.end;
    const critical = list === this.timeline.ranks[rank].ops && onPath[rank][n] ? "\non the critical path" : "";
    const [name, more] = microbatch < 0 ? ["", ""] : [microbatch, `, microbatch ${microbatch}`];
    return `${stage}${letter}${name}  ${meaning}\nrank ${rank}, stage ${stage}${more}\n`
      + `${show(start)} to ${show(end)} (${show(end - start)})${critical}`;
  }

  /* What is idle, or held, at a point where no box is. */
  wordsAt(x, y) {
    const time = this.toTime(x), {ranks, makespan} = this.timeline;
    if (!this.inPlot(x, y) || time < 0 || time > makespan) return null;
    const row = Math.floor((y + this.top) / this.row);
    if (row < ranks.length) {
      const {start, end} = ranks[row].ops, before = lastUpTo(start, time);
      const [from, to] = [before < 0 ? 0 : end[before], before + 1 < start.length ? start[before + 1] : makespan];
      return y < this.rowTop(row) + this.box ? `idle\nrank ${row}\n${show(from)} to ${show(to)} (${show(to - from)})` : null;
    }
    const rank = Math.floor((y + this.top - this.gridHeight - HEADING) / (this.curve + this.gap));
    if (rank < 0 || rank >= ranks.length) return null;
    const {times, held} = ranks[rank].memory;
    return `rank ${rank} at ${show(time)}: holds ${show(held[Math.max(lastUpTo(times, time), 0)])}`;
  }

  explain(event) {
    const [x, y] = this.place(event), found = this.opAt(x, y), words = found ? this.words(found) : this.wordsAt(x, y);
    if (words) this.tell(words, event.clientX, event.clientY); else this.hush();
  }

  tell(words, x, y) {
    this.tip.style.display = "block";
    this.tip.textContent = words;
    const right = window.innerWidth - this.tip.offsetWidth - 8, bottom = window.innerHeight - this.tip.offsetHeight - 8;
    this.tip.style.left = `${inRange(x + 14, 0, Math.max(right, 0))}px`;
    this.tip.style.top = `${inRange(y + 18, 0, Math.max(bottom, 0))}px`;
  }

  hush() { this.tip.style.display = "none"; }

  /* The keyboard's way: from box to box. */
  choose(rank, n) {
    const {ops} = this.timeline.ranks[rank];
    if (!ops.size) return;
    n = inRange(n, 0, ops.size - 1);
    this.chosen = {rank, n};
    const {begin, end} = this.view, span = end - begin;
    if (ops.start[n] < begin || ops.end[n] > end) this.look(ops.start[n] - span / 3, ops.start[n] + span * 2 / 3);
    const top = this.canvas.getBoundingClientRect().top, y = this.rowTop(rank);
    if (y < 0 || y + this.row > this.seen - AXIS) window.scrollBy(0, y - this.seen / 3);
    this.measure();
    this.said.textContent = this.words(this.chosen).replaceAll("\n", ", ");
    this.tell(this.words(this.chosen), this.toX(ops.end[n]), top + this.rowTop(rank) + this.box);
    this.ask();
  }

  step(along, across) {
    const {ranks} = this.timeline;
    if (!this.chosen) return this.choose(0, Math.max(lastUpTo(ranks[0].ops.start, this.view.begin), 0));
    const {rank, n} = this.chosen, other = inRange(rank + across, 0, ranks.length - 1);
    this.choose(other, across ? lastUpTo(ranks[other].ops.start, ranks[rank].ops.start[n]) : n + along);
  }

  key(event) {
    const {shiftKey: shift} = event;
    const act = {"+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), "0": () => this.all(),
      ArrowLeft: () => shift ? this.move(-0.1) : this.step(-1, 0), ArrowRight: () => shift ? this.move(0.1) : this.step(1, 0),
      ArrowUp: () => this.step(0, -1), ArrowDown: () => this.step(0, 1),
      Escape: () => { this.chosen = null; this.hush(); this.ask(); }}[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  wheel(event) {
    const [x] = this.place(event), sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      // A pinch on a touchpad comes as small steps of such a wheel.
      event.preventDefault();
      this.zoom(Math.exp(inRange(event.deltaY, -100, 100) / 200), this.toTime(x));
    } else if (event.shiftKey || Math.abs(sideways) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.move(sideways / 800);
    }
  }

  /* One finger, or the mouse, moves the picture; two zoom: the times below them stay below them. */
  drag() {
    const points = [...this.fingers.values()], [one, other] = points.map(({x}) => x);
    if (points.length === 1) {
      const shift = points[0].time - this.toTime(one);
      this.look(this.view.begin + shift, this.view.end + shift);
    } else if (Math.abs(other - one) > 8) {
      const [first, second] = points.map(({time}) => time), perPixel = Math.abs((second - first) / (other - one));
      const begin = (first + second) / 2 - ((one + other) / 2 - this.left) * perPixel;
      this.look(begin, begin + perPixel * this.plotWidth);
    }
  }

  grab() { for (const finger of this.fingers.values()) finger.time = this.toTime(finger.x); }

  listen() {
    const {canvas, fingers} = this;
    const on = (name, act, options) => canvas.addEventListener(name, act.bind(this), options);
    on("wheel", this.wheel, {passive: false});
    on("keydown", this.key);
    on("blur", this.hush);
    on("pointerdown", (event) => {
      const [x, y] = this.place(event);
      fingers.set(event.pointerId, {x, y, from: x, time: this.toTime(x)});
      this.moved = fingers.size > 1;
      this.grab();
      canvas.setPointerCapture(event.pointerId);
    });
    on("pointermove", (event) => {
      const finger = fingers.get(event.pointerId);
      if (!finger) return this.explain(event);
      [finger.x, finger.y] = this.place(event);
      if (!this.moved && Math.abs(finger.x - finger.from) < 5) return;
      this.moved = true;
      this.hush();
      canvas.classList.add("dragged");
      this.drag();
    });
    const lifted = (event) => {
      if (event.type === "pointerup" && !this.moved && fingers.has(event.pointerId)) this.explain(event);
      fingers.delete(event.pointerId);
      this.grab();
      if (!fingers.size) canvas.classList.remove("dragged");
    };
    on("pointerup", lifted);
    on("pointercancel", lifted);
    on("pointerleave", (event) => { if (event.pointerType === "mouse") this.hush(); });
    new ResizeObserver(() => this.timeline && this.ask()).observe(canvas);
    for (const name of ["scroll", "resize"]) window.addEventListener(name, () => { this.hush(); if (this.timeline) this.ask(); }, {passive: true});
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.timeline && this.ask());
  }
}

/* Each picture with its drawing, all on one time scale, and one legend for all of them into `list`. */
function showTogether(pictures, drawings, list) {
  const until = Math.max(...drawings.map(({makespan}) => makespan), 0);
  pictures.forEach((picture, n) => picture.show(drawings[n], until));
  // Of a kind the shades of the most stages.
  const inOrder = [...drawings].sort((one, other) => one.stagesPerRank - other.stagesPerRank);
  const kinds = new Map(inOrder.flatMap(({kinds, paints}) => kinds.map((kind, n) => [kind[0], {kind, paint: paints[n]}])));
  const shown = [...kinds.values()], {stagesPerRank} = inOrder[inOrder.length - 1];
  list.replaceChildren();
  addLegend(list, {kinds: shown.map(({kind}) => kind), paints: shown.map(({paint}) => paint), stagesPerRank});
}

/* The other pictures show the time that one shows. */
function lookTogether(one, pictures) {
  for (const other of pictures) {
    if (other === one || !other.timeline || other.until !== one.until) continue;
    if (other.view.begin !== one.view.begin || other.view.end !== one.view.end) other.look(one.view.begin, one.view.end);
  }
}

/* Which colours are which kind, into `list`. */
function addLegend(list, data) {
  const add = (swatches, words) => {
    const key = document.createElement("li");
    for (const swatch of swatches) key.appendChild(document.createElement("i")).style.background = swatch;
    key.append(words);
    list.append(key);
    return key;
  };
  data.kinds.forEach(([letter, meaning], n) => add(data.paints[n].map(([fill]) => fill), `${letter} ${meaning}`));
  add([""], "idle: the bubble").firstChild.className = "bubble";
  if (data.stagesPerRank > 1) add([], "paler: later stages of a rank");
}

/* A rank's ops as rows of a table. */
function fillTable(body, timeline, rank) {
  const {ops} = timeline.ranks[rank], rows = [];
  for (let n = 0; n < ops.size; n++) {
    const cells = [timeline.kinds[ops.kind[n]][0], ops.stage[n], ops.microbatch[n], show(ops.start[n]), show(ops.end[n])];
    const row = document.createElement("tr");
    for (const cell of cells) row.appendChild(document.createElement("td")).textContent = cell;
    rows.push(row);
  }
  body.replaceChildren(...rows);
}
