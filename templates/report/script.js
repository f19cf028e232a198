"use strict";
// Draws the charts from the embedded data. Every text from the data enters as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  let W = 520;  // units of a chart's width: a narrow chart has fewer, so that its text stays as large
  const LEAST = 280, MOST = 520, LETTER = 6.5, H = 320, LEFT = 46, RIGHT = 12, TOP = 14, BOTTOM = 42;
  const MARKERS = [  // one shape per size class, so that colour is never alone
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0-4 0Z", "M-3.6-3.6H3.6V3.6H-3.6Z", "M0-4.8L4.4 3.4H-4.4Z",
    "M0-5L5 0L0 5L-5 0Z", "M0 4.8L4.4-3.4H-4.4Z", "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
  ];
  const tip = document.getElementById("tip");
  const select = document.getElementById("baseline");
  const boxes = [...document.querySelectorAll("input[name=class]")];
  const log2 = Math.log2, log10 = Math.log10;

  // --- small pieces ---------------------------------------------------------------------------------------------
  function svg(parent, name, attributes = {}, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }
  function element(parent, name, text, attributes = {}) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  }
  const short = (x) => x >= 1024 && x % 1024 === 0 ? `${x / 1024}k` : `${+x.toPrecision(3)}`;
  const digits = (x) => x === null ? "absent" : `${+x.toPrecision(4)}`;
  const SUPER = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const power = (base, exponent) => base + [...`${exponent}`].map((c) => SUPER[c]).join("");
  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  };
  const range = (values, pad) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    const extra = (high - low || 1) * pad;
    return [low - extra, high + extra];
  };
  const scale = ([low, high], from, to) => (x) => from + (x - low) / (high - low) * (to - from);

  function frame(host, xs, ys, xTicks, yTicks, xLabel, yLabel) {
    host.replaceChildren();
    W = Math.max(LEAST, Math.min(MOST, host.clientWidth || MOST));
    const root = svg(host, "svg", { viewBox: `0 0 ${W} ${H}`, "aria-hidden": "true" });
    const x = scale(xs, LEFT, W - RIGHT), y = scale(ys, H - BOTTOM, TOP);
    for (const [at, label] of yTicks) {
      if (at < ys[0] || at > ys[1]) continue;
      svg(root, "line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(at), y2: y(at) });
      svg(root, "text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, label);
    }
    let end = 0;  // where the last label ends
    for (const [at, label] of xTicks) {
      const half = label.length * LETTER / 2;
      if (at < xs[0] || at > xs[1] || x(at) - half < end) continue;
      end = x(at) + half;
      svg(root, "line", { class: "axis", x1: x(at), x2: x(at), y1: H - BOTTOM, y2: H - BOTTOM + 4 });
      svg(root, "text", { x: x(at), y: H - BOTTOM + 16, "text-anchor": "middle" }, label);
    }
    svg(root, "line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM });
    svg(root, "text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, xLabel);
    const middle = (TOP + H - BOTTOM) / 2;
    svg(root, "text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, yLabel);
    return { root, x, y };
  }
  const line = (plot, points, kind) => points.length > 1 && svg(plot.root, "path", {
    class: kind, d: "M" + points.map(([a, b]) => `${plot.x(a).toFixed(1)} ${plot.y(b).toFixed(1)}`).join("L"),
  });

  // --- ticks ----------------------------------------------------------------------------------------------------
  function sizeTicks([low, high]) {
    const step = high - low > 12 ? 4 : 1, ticks = [];
    for (let e = Math.ceil(low); e <= high; e++) {
      if (e % step === 0) ticks.push([e, high > 20 ? power(2, e) : short(2 ** e)]);
    }
    return ticks;
  }
  const decades = (low, high) => {
    const ticks = [];
    for (let e = Math.ceil(low); e <= high; e++) ticks.push([e, e >= 0 && e < 4 ? `${10 ** e}` : power(10, e)]);
    return ticks;
  };
  const RATIOS = [0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10].map((r) => [log2(r), `${r}`]);
  const TIGHT = [0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.25].map((r) => [log2(r), `${r}`]);

  // --- visible points -------------------------------------------------------------------------------------------
  const shown = () => new Set(boxes.filter((box) => box.checked).map((box) => +box.value));
  const baselineOf = (group) => {
    const at = select ? group.baselines.indexOf(select.value) : -1;
    return at;
  };
  const AXES = {
    mnk: ([m, n, k]) => log2(m) + log2(n) + log2(k),
    mean: ([m, n, k]) => log2((m + n + k) / 3),
    max: ([m, n, k]) => log2(Math.max(m, n, k)),
  };
  // Shapes of a grid share their abscissa: a small shift, always the same for a shape, sets them apart.
  const shift = (i, width) => ((i * 0.618034) % 1 - 0.5) * width;

  function point(plot, group, i, a, b, sure, key) {
    const shape = group.shapes[i];
    const size = group.shapes.length > 300 ? " scale(0.72)" : "";
    const node = svg(plot.root, "path", {
      class: `point c${shape[3]}${sure ? " sure" : ""}${shape[7].length ? " doubt" : ""}`, d: MARKERS[shape[3]],
      transform: `translate(${plot.x(a).toFixed(1)} ${plot.y(b).toFixed(1)})${size}`,
    });
    node.dataset.group = key;
    node.dataset.shape = i;
  }

  const draw = {
    speedups(host, chart, caption) {
      const group = data.groups[chart.group], at = baselineOf(group), classes = shown();
      if (at < 0) { host.replaceChildren("This baseline was not measured here."); caption.textContent = ""; return; }
      const all = group.shapes.map((s, i) => [AXES[chart.x](s), s[6][at], i]).filter((p) => p[1]);
      if (!all.length) { host.replaceChildren("No problem has both times."); caption.textContent = ""; return; }
      const seen = all.filter((p) => classes.has(group.shapes[p[2]][3]));
      const xs = range(all.map((p) => p[0]), 0.04), ys = range([0, ...all.map((p) => log2(p[1][0]))], 0.06);
      const plot = frame(host, xs, ys, sizeTicks(xs), ys[1] - ys[0] < 0.7 ? TIGHT : RATIOS, chart.label,
        `speedup over ${group.baselines[at]}`);
      svg(plot.root, "line", { class: "one", x1: LEFT, x2: W - RIGHT, y1: plot.y(0), y2: plot.y(0) });
      const width = (xs[1] - xs[0]) * 0.018;
      for (const [a, [r, low, high], i] of seen) {
        point(plot, group, i, a + shift(i, width), log2(r), low > 1 || high < 1, chart.group);
      }
      const bins = new Map();
      for (const [a, [r]] of seen) {
        const bin = Math.round(a);
        if (!bins.has(bin)) bins.set(bin, []);
        bins.get(bin).push([a, log2(r)]);
      }
      line(plot, [...bins.values()].filter((b) => b.length > 4)
        .map((b) => [median(b.map((p) => p[0])), median(b.map((p) => p[1]))]).sort((p, q) => p[0] - q[0]), "trend");
      const logs = seen.map((p) => log2(p[1][0]));
      const mean = 2 ** (logs.reduce((a, b) => a + b, 0) / logs.length);
      const lost = logs.filter((value) => value < 0).length / logs.length;
      caption.textContent = logs.length
        ? `${seen.length} of ${all.length} shapes, geomean ${mean.toFixed(3)}, ${(100 * lost).toFixed(1)} % below 1`
        : "no size class is chosen";
    },

    roofline(host, chart, caption) {
      const group = data.groups[chart.group], [peak, bandwidth] = group.roof, classes = shown();
      const all = group.shapes.map(([m, n, k, , , times], i) => times[0] === null ? null
        : [log10(m * n * k / (m * k + n * k + m * n)), log10(2 * m * n * k / times[0] / 1e6), i]).filter((p) => p);
      if (!all.length) { host.replaceChildren("Our kernels were not timed here."); return; }
      const xs = range(all.map((p) => p[0]), 0.05);
      const roof = (a) => Math.min(log10(peak), log10(bandwidth) + a);
      const tops = peak && bandwidth ? [roof(xs[0]), roof(xs[1])] : [];
      const ys = range([...all.map((p) => p[1]), ...tops], 0.05);
      const xTicks = decades(xs[0], xs[1]);
      const plot = frame(host, xs, ys, xTicks, decades(ys[0], ys[1]), "arithmetic intensity, FLOP per byte", "TFLOP/s");
      if (tops.length) {
        const ridge = log10(peak / bandwidth);
        const corners = ridge > xs[0] && ridge < xs[1] ? [[ridge, log10(peak)]] : [];
        line(plot, [[xs[0], tops[0]], ...corners, [xs[1], tops[1]]], "roof");
        svg(plot.root, "text", { x: W - RIGHT, y: plot.y(tops[1]) - 5, "text-anchor": "end" },
          `${peak.toFixed(0)} TFLOP/s, ${bandwidth.toFixed(2)} TB/s`);
      }
      const seen = all.filter((p) => classes.has(group.shapes[p[2]][3]));
      for (const [a, b, i] of seen) point(plot, group, i, a, b, true, chart.group);
      caption.textContent = `${seen.length} of ${all.length} shapes`;
    },

    discs(host, chart) {
      const yOf = chart.linear ? (v) => v : log2;
      const xs = range(chart.discs.map((d) => log2(d[0])), 0.06), ys = range(chart.discs.map((d) => yOf(d[1])), 0.08);
      const yTicks = chart.linear ? [...Array(14).keys()].map((v) => [v, `${v}`]) : sizeTicks(ys);
      const plot = frame(host, xs, ys, sizeTicks(xs), yTicks, chart.x, chart.y);
      const most = Math.max(...chart.discs.map((d) => d[2]));
      for (const [a, b, count] of chart.discs) {
        const node = svg(plot.root, "circle", {
          class: "disc", cx: plot.x(log2(a)), cy: plot.y(yOf(b)), r: (1.5 + 13 * Math.sqrt(count / most)).toFixed(1),
        });
        node.dataset.tip = `${chart.y} ${+b.toPrecision(4)} at ${chart.x} ${a > 2 ** 20 ? power(2, Math.round(log2(a))) : a}: ${count} records`;
      }
      line(plot, chart.line.map(([a, b]) => [log2(a), yOf(b)]), "trend");
    },

    shares(host, chart) {
      const xs = range(chart.bins.map((b) => b[0]), 0.03), ys = [0, 1.05];
      xs[1] += 1;
      const plot = frame(host, xs, ys, sizeTicks(xs), [0, 0.25, 0.5, 0.75, 1].map((v) => [v, `${100 * v}`]), "M·N·K", chart.y);
      const width = Math.max(2, plot.x(1) - plot.x(0) - 2);
      for (const [at, chosen, effective, count] of chart.bins) {
        for (const [kind, value] of [["bar", chosen], ["bar effective", effective]]) {
          const node = svg(plot.root, "rect", {
            class: kind, x: plot.x(at) + 1, width, y: plot.y(value), height: plot.y(0) - plot.y(value),
          });
          node.dataset.tip = `M·N·K from ${power(2, at)}: ${count} records, chosen in ${(100 * chosen).toFixed(0)} %, `
            + `in effect (grid.z > 1) in ${(100 * effective).toFixed(0)} %`;
        }
      }
      for (const [at, words, side] of [[27, "paper: 44 % below", -1], [36, "paper: 99 % above", 1]]) {
        if (at < xs[0] || at > xs[1]) continue;
        svg(plot.root, "line", { class: "rule", x1: plot.x(at), x2: plot.x(at), y1: TOP, y2: H - BOTTOM });
        svg(plot.root, "text", { x: plot.x(at) + 4 * side, y: TOP + 2, "text-anchor": side < 0 ? "end" : "start" }, words);
      }
    },
  };

  function drawAll() {
    for (const host of document.querySelectorAll(".chart")) {
      const chart = data.charts[host.dataset.chart];
      draw[chart.kind](host, chart, host.parentElement.querySelector(".figure"));
    }
    for (const details of document.querySelectorAll("details.all[open]")) fill(details);
  }

  // --- every shape as a table -----------------------------------------------------------------------------------
  function fill(details) {
    const group = data.groups[details.dataset.group], at = baselineOf(group), classes = shown();
    const host = details.querySelector(".scroll");
    host.replaceChildren();
    const table = element(host, "table"), head = element(element(table, "thead"), "tr"), body = element(table, "tbody");
    const name = at < 0 ? null : group.baselines[at];
    for (const title of ["M_N_K", "class", "ours, µs", `${name ?? "baseline"}, µs`, "speedup [95 %]", "record"]) {
      element(head, "th", title, { scope: "col" });
    }
    for (const [m, n, k, kind, record, times, ratios] of group.shapes) {
      if (!classes.has(kind)) continue;
      const row = element(body, "tr"), ratio = at < 0 ? null : ratios[at];
      element(row, "th", `${m}_${n}_${k}`, { scope: "row" });
      element(row, "td", data.classes[kind]);
      element(row, "td", digits(times[0]));
      element(row, "td", digits(name === null ? null : times[group.contenders.indexOf(name)]));
      element(row, "td", ratio ? `${ratio[0].toFixed(3)} [${ratio[1].toFixed(3)}, ${ratio[2].toFixed(3)}]` : "absent");
      const cell = element(row, "td");
      if (record !== null) element(cell, "a", data.records[record].name, { href: `#record-${record}` });
    }
  }

  // --- hover, records -------------------------------------------------------------------------------------------
  function describe(node) {
    tip.replaceChildren();
    if (node.dataset.tip) { element(tip, "div", node.dataset.tip); return; }
    const group = data.groups[node.dataset.group], [m, n, k, kind, record, times, ratios, doubts] = group.shapes[node.dataset.shape];
    element(tip, "b", `${m} × ${n} × ${k}`);
    element(tip, "div", `${data.classes[kind]}, ${(2 * m * n * k / times[0] / 1e6).toPrecision(4)} TFLOP/s`);
    if (record !== null) element(tip, "div", `${data.records[record].name} — click for the record`, { class: "soft" });
    for (const doubt of doubts) element(tip, "div", `Doubtful: ${doubt}`);
    const body = element(element(tip, "table"), "tbody");
    group.contenders.forEach((name, i) => {
      const row = element(body, "tr"), ratio = i ? ratios[i - 1] : null;
      element(row, "td", name);
      element(row, "td", times[i] === null ? "absent" : `${digits(times[i])} µs`);
      element(row, "td", ratio ? `${ratio[0].toFixed(3)} [${ratio[1].toFixed(3)}, ${ratio[2].toFixed(3)}]` : "");
    });
  }
  document.addEventListener("pointerover", (event) => {
    const node = event.target.closest?.("[data-shape], [data-tip]");
    if (!node) { tip.hidden = true; return; }
    describe(node);
    tip.hidden = false;
    const size = tip.getBoundingClientRect();
    const left = event.clientX + 16 + size.width > innerWidth ? event.clientX - size.width - 12 : event.clientX + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - size.height - 8))}px`;
  });
  document.addEventListener("click", (event) => {
    const node = event.target.closest?.("[data-shape]");
    const record = node && data.groups[node.dataset.group].shapes[node.dataset.shape][4];
    if (node && record !== null) location.hash = `record-${record}`;
  });
  const dialog = document.getElementById("record");
  function showRecord() {
    const found = /^#record-(\d+)$/.exec(location.hash), entry = found && data.records[found[1]];
    if (!entry) return;
    tip.hidden = true;
    const own = entry.record;
    document.getElementById("record-name").textContent = `${entry.name}, binary ${entry.digest}`
      + (own ? `; in the catalog for ${own.gpu} ${own.acc} ${own.layout} ${own.m}_${own.n}_${own.k}` : "");
    document.getElementById("record-text").textContent = entry.record
      ? JSON.stringify(entry.record, null, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inner) => `[${inner.replace(/\s+/g, " ")}]`)
      : "This catalog has no record of that name: it was measured with another one, or changed for the run.";
    if (!dialog.open) dialog.showModal();
  }
  dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
  addEventListener("hashchange", showRecord);

  for (const cell of document.querySelectorAll("section:has(details.all) tbody td:last-child")) {
    const group = data.groups[cell.closest("section").id], problem = cell.parentElement.cells[0].textContent;
    const place = group.shapes.find(([m, n, k]) => `${m}_${n}_${k}` === problem)?.[4] ?? null;
    if (place !== null && data.records[place].name === cell.textContent) {
      cell.textContent = "";
      element(cell, "a", data.records[place].name, { href: `#record-${place}` });
    }
  }
  document.querySelectorAll(".key path").forEach((path, i) => path.setAttribute("d", MARKERS[i]));
  document.getElementById("controls")?.addEventListener("change", drawAll);
  document.getElementById("controls")?.addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll("details.all").forEach((details) => details.addEventListener("toggle", () => details.open && fill(details)));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  drawAll();
  showRecord();
})();
