"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const byId = new Map(DATA.settings.map((s) => [s.id, s]));
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  document.documentElement.classList.add("js");

  // -- small tools ---------------------------------------------------------------------------------------------------
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  function draw(tag, attributes, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  function number(x, digits = 3) {
    if (x === null || x === undefined) return "–";
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 1e6 || size < 1e-3) return x.toExponential(digits - 1);
    return size >= 10 ** (digits - 1) ? x.toFixed(0) : x.toPrecision(digits);
  }
  const short = (x) => (x !== 0 && (Math.abs(x) >= 1e6 || Math.abs(x) < 1e-3) ? x.toExponential() : String(Number(x.toPrecision(4)))); // of an axis
  function estimate([mean, error], scale = 1) {
    if (mean === null) return "–";
    if (!error) return number(mean * scale);
    let decimals = 0;
    while (error * scale * 10 ** decimals < 9.5 && decimals < 5) decimals += 1;
    if (decimals === 5) return `${number(mean * scale)} ± ${number(error * scale, 2)}`;
    return `${(mean * scale).toFixed(decimals)} ± ${(error * scale).toFixed(decimals)}`;
  }
  const unique = (values) => [...new Set(values)];
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  function spread(values) {
    if (values.length < 2) return 0;
    const m = mean(values);
    return Math.sqrt(values.reduce((a, v) => a + (v - m) ** 2, 0) / (values.length - 1) / values.length);
  }
  function options(select, values, labels = values) {
    select.replaceChildren(...values.map((value, i) => {
      const option = make("option", { value });
      option.textContent = labels[i];
      return option;
    }));
  }

  // -- matchers: one colour, dash and marker each; shown or hidden everywhere at once ---------------------------------
  const looks = DATA.matchers.map((m, i) => ({ ...m, colour: `var(--m${i})`, hidden: false }));
  const redraws = [];
  const redraw = () => redraws.forEach((f) => f());
  function marker(kind, x, y, r, attributes) {
    if (kind === "circle") return draw("circle", { cx: x, cy: y, r, ...attributes });
    const corners = {
      square: [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([a, b]) => [a * 0.88, b * 0.88]),
      triangle: [[0, -1.2], [1.1, 0.85], [-1.1, 0.85]],
      diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
      down: [[0, 1.2], [1.1, -0.85], [-1.1, -0.85]],
    }[kind];
    return draw("polygon", { points: corners.map(([a, b]) => `${x + a * r},${y + b * r}`).join(" "), ...attributes });
  }
  const dashed = (look, width) => (look.dashes.length ? { "stroke-dasharray": look.dashes.map((d) => d * width).join(" ") } : {});
  function legend(box, names) {
    box.replaceChildren(...looks.filter((m) => names.includes(m.name)).map((look) => {
      const sample = draw("svg", { width: 26, height: 12, "aria-hidden": "true" },
        draw("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: look.colour, "stroke-width": 2, ...dashed(look, 2) }),
        marker(look.marker, 13, 6, 4, { fill: look.colour }));
      const button = make("button", { type: "button", "aria-pressed": String(!look.hidden) }, sample, look.title);
      button.addEventListener("click", () => {
        look.hidden = !look.hidden;
        redraw();
        // The redraw made a new button in this place: keep the keyboard on it.
        [...box.children].find((b) => b.textContent === look.title)?.focus();
      });
      return button;
    }));
  }

  // -- one chart: lines, bands, error bars or dots; hover and arrow keys read values ----------------------------------
  function ticks(low, high, count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) found.push(Number(t.toPrecision(10)));
    return found;
  }
  function decades(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) found.push(...[1, 2, 5].map((k) => k * 10 ** power));
    const inside = found.filter((t) => t >= low && t <= high);
    return inside.length > 1 ? inside : ticks(low, high, 4);
  }
  // spec: {title, x: {label, categories?, log?, low?, high?, values?}, y: {label, zero?}, rules?: {x?, y?},
  //        series: [{name, colour, dashes, marker, line, dots, band, thin, points: [{x, y, low?, high?, note?}]}], free: nearest point, not nearest x}
  function chart(box, spec) {
    const width = Math.max(260, Math.floor(box.clientWidth || 600));
    const all = spec.series.flatMap((s) => s.points);
    const figure = make("figure");
    const caption = make("figcaption");
    caption.textContent = spec.title;
    figure.append(caption);
    box.replaceChildren(figure);
    if (!all.length) {
      const empty = make("p", { class: "quiet" });
      empty.textContent = "Nothing to show: every matcher is hidden, or nothing was measured.";
      figure.append(empty);
      return;
    }
    const categories = spec.x.categories;
    const tall = all.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]);
    let low = Math.min(...tall), high = Math.max(...tall, spec.rules?.y ?? -Infinity, spec.y.high ?? -Infinity);
    if (spec.y.zero) low = Math.min(0, low);
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    let height = Math.round(Math.min(340, Math.max(230, width * 0.6)));
    const marks = ticks(low, high, height / 48);
    const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
    if (!spec.y.zero || low < 0) low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    const yTicks = ticks(low, high, height / 48);
    const wide = all.map((p) => p.x);
    let left = spec.x.low ?? Math.min(...wide, spec.rules?.x ?? Infinity), right = spec.x.high ?? Math.max(...wide, spec.rules?.x ?? -Infinity);
    if (categories) [left, right] = [-0.5, categories.length - 0.5];
    const log = spec.x.log && left > 0;
    if (left === right) [left, right] = log ? [left / 2, right * 2] : [left - 1, right + 1];
    else if (!categories && spec.x.low === undefined) {
      const pad = 0.04;
      if (log) { const f = (right / left) ** pad; left /= f; right *= f; } else { const d = (right - left) * pad; left -= d; right += d; }
    }
    const label = short;
    const long = Math.max(...yTicks.map((t) => label(t).length));
    const names = categories?.map((c) => c.split(" "));
    const steep = names && (width - 42 - 7 * long) / names.length < 44; // too narrow for words side by side
    const rows = !names || steep ? 1 : Math.max(...names.map((n) => n.length));
    const slack = steep ? 3.9 * Math.max(...categories.map((c) => c.length)) : 0;
    const edge = { top: 14, right: 12, bottom: 26 + 13 * rows + slack, left: 30 + 7 * long };
    height += Math.max(0, edge.bottom - 52); // long names take nothing from the plot
    const inner = { w: width - edge.left - edge.right, h: height - edge.top - edge.bottom };
    const place = (v) => (log ? Math.log(v / left) / Math.log(right / left) : (v - left) / (right - left));
    const X = (v) => edge.left + inner.w * place(v);
    const Y = (v) => edge.top + inner.h * (1 - (v - low) / (high - low));
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    const series = spec.series.filter((s) => s.points.length);
    svg.setAttribute("aria-label", `${spec.title}. ${spec.y.label} against ${spec.x.label}. ` + series.slice(0, 12).map((s) => {
      const values = s.points.map((p) => p.y);
      return `${s.name}: ${number(Math.min(...values))} to ${number(Math.max(...values))}`;
    }).join("; "));
    for (const t of yTicks) {
      svg.append(draw("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: Y(t), y2: Y(t) }),
        draw("text", { x: edge.left - 6, y: Y(t) + 4, "text-anchor": "end" }, label(t)));
    }
    svg.append(draw("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom }));
    const bottom = height - edge.bottom + 16;
    if (categories) {
      if (steep) categories.forEach((name, i) => svg.append(draw("text", { transform: `translate(${X(i) + 4} ${bottom - 4}) rotate(-50)`, "text-anchor": "end", style: "font-size:10px" }, name)));
      else names.forEach((words, i) => words.forEach((word, k) =>
        svg.append(draw("text", { x: X(i), y: bottom + 13 * k, "text-anchor": "middle", ...(inner.w / names.length < 70 ? { style: "font-size:10px" } : {}) }, word))));
    } else {
      for (const t of spec.x.values ?? (log ? decades(left, right) : ticks(left, right, Math.max(3, inner.w / 90)))) {
        svg.append(draw("text", { x: X(t), y: bottom, "text-anchor": "middle" }, label(t)));
      }
    }
    svg.append(draw("text", { x: edge.left + inner.w / 2, y: height - 3, "text-anchor": "middle" }, spec.x.label),
      draw("text", { transform: `translate(12 ${edge.top + inner.h / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.y.label));
    if (spec.rules?.y !== undefined) svg.append(draw("line", { class: "rule", x1: edge.left, x2: width - edge.right, y1: Y(spec.rules.y), y2: Y(spec.rules.y) }));
    if (spec.rules?.x !== undefined) svg.append(draw("line", { class: "rule", y1: edge.top, y2: height - edge.bottom, x1: X(spec.rules.x), x2: X(spec.rules.x) }));
    for (const s of series) {
      const path = (points, key) => points.map((p) => `${X(p.x).toFixed(1)},${Y(p[key]).toFixed(1)}`);
      if (s.band) svg.append(draw("polygon", { points: [...path(s.points, "high"), ...path([...s.points].reverse(), "low")].join(" "), fill: s.colour, opacity: 0.2 }));
      if (s.line) svg.append(draw("polyline", { points: path(s.points, "y").join(" "), fill: "none", stroke: s.colour, "stroke-width": s.thin ? 1.2 : 2.2, "stroke-linejoin": "round", ...dashed(s, 2) }));
      if (s.dots) {
        for (const p of s.points) {
          if (p.high > p.low) svg.append(draw("line", { x1: X(p.x), x2: X(p.x), y1: Y(p.low), y2: Y(p.high), stroke: s.colour, "stroke-width": 1.4 }));
          svg.append(marker(s.marker, X(p.x), Y(p.y), spec.free ? 3.6 : 4.4, { fill: s.colour, ...(spec.free ? { opacity: 0.75 } : {}) }));
        }
      }
    }
    const cross = draw("line", { class: "cross", y1: edge.top, y2: height - edge.bottom });
    const ring = draw("circle", { class: "ring", r: 7 });
    svg.append(cross, ring);
    const tip = make("div", { class: "tip", hidden: "" });
    const plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${spec.title}: arrow keys read the values` }, svg, tip);
    const spoken = make("div", { class: "hidden", "aria-live": "polite" });
    figure.append(plot, spoken);

    // Stops: places at which values are read, from left to right.
    const flat = series.flatMap((s) => s.points.map((p) => ({ s, p })));
    const stops = spec.free
      ? flat.sort((a, b) => a.p.x - b.p.x).map((one) => ({ x: one.p.x, y: one.p.y, list: [one] }))
      : unique(flat.map((one) => one.p.stop ?? one.p.x)).sort((a, b) => a - b).map((x) => ({ x, list: flat.filter((one) => (one.p.stop ?? one.p.x) === x) }));
    let at = -1;
    function show(i) {
      at = i;
      const stop = stops[i];
      const head = make("b");
      head.textContent = stop.list[0].p.note ?? `${spec.x.label}: ${categories ? categories[stop.x] : short(stop.x)}`;
      const lines = [...stop.list].sort((a, b) => b.p.y - a.p.y).map(({ s, p }) => {
        const swatch = make("span", { class: "swatch", "aria-hidden": "true", style: `--c:${s.colour}` });
        const error = p.high > p.low ? (p.high - p.low) / 2 : 0;
        return make("div", {}, swatch, `${s.name} ${estimate([p.y, error])}${spec.free ? ` (${number(p.x)})` : ""}`);
      });
      tip.replaceChildren(head, ...lines);
      tip.hidden = false;
      const scale = plot.clientWidth / width;
      const px = X(stop.x) * scale;
      // Beside the place that is read, on the side with room; never out of the plot.
      tip.style.left = "0";
      const beside = px > plot.clientWidth / 2 ? px - 12 - tip.offsetWidth : px + 12;
      tip.style.left = `${Math.max(0, Math.min(beside, plot.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${edge.top * scale}px`;
      spoken.textContent = tip.innerText;
      const target = spec.free ? ring : cross;
      if (spec.free) { ring.setAttribute("cx", X(stop.x)); ring.setAttribute("cy", Y(stop.y)); } else { cross.setAttribute("x1", X(stop.x)); cross.setAttribute("x2", X(stop.x)); }
      target.style.visibility = "visible";
    }
    function hide() { at = -1; tip.hidden = true; cross.style.visibility = ring.style.visibility = "hidden"; }
    plot.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect();
      const px = (event.clientX - frame.left) * width / frame.width, py = (event.clientY - frame.top) * width / frame.width;
      const away = (stop) => (spec.free ? Math.hypot(X(stop.x) - px, Y(stop.y) - py) : Math.abs(X(stop.x) - px));
      let near = 0;
      stops.forEach((stop, i) => { if (away(stop) < away(stops[near])) near = i; });
      if (spec.free && away(stops[near]) > 40) hide(); else if (near !== at) show(near);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!move) return;
      event.preventDefault();
      show(Math.min(stops.length - 1, Math.max(0, at < 0 ? (move > 0 ? 0 : stops.length - 1) : at + move)));
    });

    const numbers = make("details", {}, make("summary", {}, "Numbers of this figure"));
    numbers.addEventListener("toggle", () => {
      if (!numbers.open || numbers.children.length > 1) return;
      const body = make("tbody");
      for (const stop of stops) {
        for (const { s, p } of stop.list) {
          const cells = [p.note ?? (categories ? categories[stop.x] : short(stop.x)), ...(spec.free ? [number(p.x, 4)] : []), s.name, estimate([p.y, p.high > p.low ? (p.high - p.low) / 2 : 0])];
          body.append(make("tr", {}, ...cells.map((c) => make("td", {}, c))));
        }
      }
      const heads = [spec.free ? "setting" : spec.x.label, ...(spec.free ? [spec.x.label] : []), "line", spec.y.label];
      numbers.append(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers: ${spec.title}` },
        make("table", { class: "small" }, make("thead", {}, make("tr", {}, ...heads.map((h) => make("th", { scope: "col" }, h)))), body)));
    });
    figure.append(numbers);
  }

  const visible = (names) => looks.filter((m) => names.includes(m.name) && !m.hidden);
  const matchersOf = (settings) => unique(settings.flatMap((s) => Object.keys(s.matchers)));
  const ranged = ([m, e], scale = 1) => ({ y: m * scale, low: (m - (e ?? 0)) * scale, high: (m + (e ?? 0)) * scale });

  // -- tables: every one sorts, by click or keyboard -----------------------------------------------------------------
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const value = (row, i) => {
      const cell = row.cells[i];
      const text = cell.dataset.v ?? cell.textContent.trim();
      const plain = text.replace(/,/g, "");
      return plain === "" || plain === "–" ? null : (Number.isNaN(Number(plain)) ? text : Number(plain));
    };
    heads.forEach((head, i) => {
      const button = make("button", { type: "button" }, ...head.childNodes);
      head.replaceChildren(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((h) => h.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [row, value(row, i)]);
        rows.sort(([, a], [, b]) => {
          if (a === null || b === null) return (a === null) - (b === null); // what is missing stays last
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
          return down ? -order : order;
        });
        body.append(...rows.map(([row]) => row));
      });
    });
  }
  document.querySelectorAll("table.sortable").forEach(sortable);

  // -- the main table: quantity and filters --------------------------------------------------------------------------
  const filters = DATA.cell.map((name, i) => {
    const select = make("select", { "data-filter": name });
    const values = unique(DATA.settings.map((s) => s.cell[i]));
    options(select, ["", ...values], ["all", ...values]);
    if (values.length > 1) $("filters").append(make("label", {}, name, select));
    select.addEventListener("change", narrow);
    return select;
  });
  const rows = [...$("main").tBodies[0].rows];
  function narrow() {
    let shown = 0;
    for (const row of rows) {
      const setting = byId.get(row.dataset.id);
      row.hidden = filters.some((select, i) => select.value && select.value !== setting.cell[i]);
      shown += !row.hidden;
    }
    $("count").textContent = `${shown} of ${rows.length} settings shown`;
  }
  $("quantity").addEventListener("change", () => {
    const quantity = $("quantity").value;
    const scale = quantity === "accuracy_barrier" ? 100 : 1;
    const ratio = quantity === "percent";
    for (const row of rows) {
      const setting = byId.get(row.dataset.id);
      for (const cell of row.querySelectorAll("td[data-matcher]")) {
        const found = setting.matchers[cell.dataset.matcher]?.[ratio && cell.dataset.matcher === "naive" ? "loss_barrier" : quantity];
        cell.dataset.v = found?.[0] ?? "";
        cell.querySelector(".value").textContent = found ? estimate(found, scale) : "–";
      }
    }
    $("main").caption.textContent = $("quantity").selectedOptions[0].textContent + (ratio ? "; naive itself in nats" : "");
    const naive = $("main").querySelector('th[data-matcher="naive"] button');
    if (naive) naive.lastChild.textContent = ratio ? "naive (nats)" : "naive";
    $("main").querySelectorAll("th[aria-sort]").forEach((h) => h.setAttribute("aria-sort", "none"));
  });
  narrow();

  // -- barriers left of one task, a chart for each encoding -----------------------------------------------------------
  const family = (s) => `${s.cell[0]} · ${s.cell[1]}`;
  options($("task"), unique(DATA.settings.map(family)));
  function facets() {
    const chosen = DATA.settings.filter((s) => family(s) === $("task").value);
    const names = matchersOf(chosen).filter((n) => n !== "naive");
    legend($("legend-main"), names);
    const shown = visible(names);
    const pes = unique(chosen.map((s) => s.cell[2]));
    // One scale, so that encodings can be compared by eye.
    const top = Math.max(0, ...chosen.flatMap((s) => shown.map((look) => s.matchers[look.name]?.percent ?? [0, 0]).map(([m, e]) => m + e)));
    const boxes = pes.map(() => make("div"));
    $("facets").replaceChildren(...boxes);
    pes.forEach((pe, i) => {
      const group = chosen.filter((s) => s.cell[2] === pe);
      chart(boxes[i], {
        title: pe,
        x: { label: "scope drawn afresh", categories: group.map((s) => s.cell[3].replace("-", " ") + (s.detail ? ` ${s.detail}` : "")) },
        y: { label: "barrier left (% of naive)", zero: true, high: top },
        rules: { y: 100 },
        series: shown.map((look, k) => ({
          ...look, name: look.title, dots: true,
          points: group.flatMap((s, x) => (s.matchers[look.name]?.percent[0] ?? null) === null ? [] : [{ x: x + 0.6 * ((k + 0.5) / shown.length - 0.5), stop: x, ...ranged(s.matchers[look.name].percent) }]),
        })),
      });
    });
  }
  redraws.push(facets);
  $("task").addEventListener("change", facets);

  // -- one setting ----------------------------------------------------------------------------------------------------
  options($("choose"), DATA.settings.map((s) => s.id), DATA.settings.map((s) => s.label));
  const DASHES = [[], [5, 2], [1.5, 1.5], [6, 1.5, 1, 1.5], [3, 1]];
  function one() {
    const setting = byId.get($("choose").value);
    const names = Object.keys(setting.matchers);
    legend($("legend-one"), names);
    $("chosen").textContent = setting.label;
    const each = $("each").checked;
    for (const [quantity, title, unit, scale] of [["loss", "Test loss on the way from model A to model B", "loss (nats)", 1], ["accuracy", "Test accuracy on the way from model A to model B", "accuracy (%)", 100]]) {
      chart($(quantity), {
        title,
        x: { label: "place on the segment, t", low: 0, high: 1, values: [0, 0.25, 0.5, 0.75, 1] },
        y: { label: unit },
        series: visible(names).flatMap((look) => {
          const found = setting.matchers[look.name];
          if (each) {
            return found.pairs.map((pair) => ({ ...look, name: `${look.title}, seeds ${pair.seeds[0]} and ${pair.seeds[1]}`, line: true, thin: true, points: found.points.map((x, i) => ({ x, y: pair[quantity][i] * scale })) }));
          }
          const points = found.points.map((x, i) => {
            const values = found.pairs.map((pair) => pair[quantity][i] * scale);
            return { x, ...ranged([mean(values), spread(values)]) };
          });
          return [{ ...look, name: look.title, line: true, band: found.pairs.length > 1, points }];
        }),
      });
    }
    const trained = setting.models.filter((m) => m.steps.length);
    chart($("training"), {
      title: "Training of the models",
      x: { label: "step" },
      y: { label: "training loss (nats)" },
      series: trained.map((m, i) => ({ name: `seed ${m.seed}`, colour: "var(--ink)", dashes: DASHES[i % DASHES.length], line: true, thin: true, points: m.steps.map((x, k) => ({ x, y: m.training[k] })) })),
    });
    const body = make("tbody");
    const lines = [...(setting.base ? [["base", ...setting.base]] : []), ...setting.models.map((m) => [`seed ${m.seed}`, m.loss, m.accuracy])];
    for (const [name, loss, accuracy] of lines) body.append(make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "n" }, loss.toFixed(4)), make("td", { class: "n" }, (100 * accuracy).toFixed(2))));
    const pairs = make("tbody");
    for (const look of looks.filter((m) => names.includes(m.name))) {
      for (const pair of setting.matchers[look.name].pairs) pairs.append(make("tr", {}, make("th", { scope: "row" }, look.title), make("td", {}, pair.seeds.join(" – ")), make("td", { class: "n" }, number(pair.barrier)), make("td", { class: "n" }, number(pair.distance))));
    }
    const table = (name, heads, rows) => make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
      make("table", {}, make("caption", {}, name), make("thead", {}, make("tr", {}, ...heads.map((h, i) => make("th", { scope: "col", class: i >= heads.length - 2 ? "n" : "" }, h)))), rows));
    $("scores").replaceChildren(table("Test scores of the models", ["model", "loss (nats)", "accuracy (%)"], body),
      make("details", {}, make("summary", {}, `All pairs (${pairs.rows.length})`), table("Every pair", ["matcher", "seeds", "loss barrier (nats)", "distance"], pairs)));
  }
  redraws.push(one);
  $("choose").addEventListener("change", one);
  $("each").addEventListener("change", one);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-show]");
    if (!link) return;
    $("choose").value = link.dataset.show;
    one();
  });

  // -- sweeps ---------------------------------------------------------------------------------------------------------
  if (DATA.sweeps.length) {
    options($("sweep"), DATA.sweeps.map((_, i) => i), DATA.sweeps.map((s) => `${s.field}: ${s.fixed}`));
    const sweep = () => {
      const found = DATA.sweeps[Number($("sweep").value)];
      const settings = found.ids.map((id) => byId.get(id));
      const names = matchersOf(settings).filter((n) => n !== "naive");
      legend($("legend-sweep"), names);
      const values = found.numeric ? found.values : found.values.map((_, i) => i);
      chart($("sweep-chart"), {
        title: `Barrier left against ${found.field} (${found.fixed})`,
        x: found.numeric ? { label: found.field, log: Math.min(...values) > 0 && Math.max(...values) >= 4 * Math.min(...values), values: unique(values) } : { label: found.field, categories: found.values },
        y: { label: "barrier left (% of naive)", zero: true },
        rules: { y: 100 },
        series: visible(names).map((look) => ({ ...look, name: look.title, line: true, dots: true, points: settings.flatMap((s, i) => (s.matchers[look.name]?.percent[0] ?? null) === null ? [] : [{ x: values[i], ...ranged(s.matchers[look.name].percent) }]) })),
      });
    };
    redraws.push(sweep);
    $("sweep").addEventListener("change", sweep);
  }

  // -- dimensions against barrier ---------------------------------------------------------------------------------------
  if ($("dimension-chart")) {
    const scopes = unique(DATA.settings.map((s) => s.cell[3]));
    options($("dimension-scope"), scopes);
    $("dimension-scope").value = scopes[scopes.length - 1];
    const dimension = () => {
      const settings = DATA.settings.filter((s) => s.cell[3] === $("dimension-scope").value && s.dimension !== null);
      const names = matchersOf(settings).filter((n) => n !== "naive");
      legend($("legend-dimension"), names);
      chart($("dimension-chart"), {
        title: `Symmetry of attention against barrier left, ${$("dimension-scope").value}, one mark a setting and matcher`,
        x: { label: "dimension of attention's group", log: settings.every((s) => s.dimension > 0) },
        y: { label: "barrier left (% of naive)", zero: true },
        rules: { y: 100 }, free: true,
        series: visible(names).map((look) => ({ ...look, name: look.title, dots: true, points: settings.flatMap((s) => (s.matchers[look.name]?.percent[0] ?? null) === null ? [] : [{ x: s.dimension, note: s.label, ...ranged(s.matchers[look.name].percent) }]) })),
      });
    };
    redraws.push(dimension);
    $("dimension-scope").addEventListener("change", dimension);
  }

  // -- distance against barrier -------------------------------------------------------------------------------------------
  options($("distance-task"), ["", ...unique(DATA.settings.map(family))], ["all", ...unique(DATA.settings.map(family))]);
  function distance() {
    const settings = DATA.settings.filter((s) => s.matchers.naive && (!$("distance-task").value || family(s) === $("distance-task").value));
    const names = matchersOf(settings).filter((n) => n !== "naive");
    legend($("legend-distance"), names);
    chart($("distance-chart"), {
      title: "Distance left against barrier left",
      x: { label: "distance in weights left (% of naive)" },
      y: { label: "loss barrier left (% of naive)", zero: true },
      rules: { x: 100, y: 100 }, free: true,
      series: visible(names).map((look) => ({
        ...look, name: look.title, dots: true,
        points: settings.flatMap((s) => (s.matchers[look.name]?.pairs ?? []).flatMap((pair) => {
          const base = s.matchers.naive.pairs.find((p) => String(p.seeds) === String(pair.seeds));
          return base && base.barrier > 0 && base.distance > 0 ? [{ x: 100 * pair.distance / base.distance, y: 100 * pair.barrier / base.barrier, note: `${s.label}, seeds ${pair.seeds.join(" and ")}` }] : [];
        })),
      })),
    });
  }
  redraws.push(distance);
  $("distance-task").addEventListener("change", distance);

  // -- first drawing, and again when the width changes; print shows everything ---------------------------------------------
  redraw();
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    redraw();
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("#reproduce details:not([open], .long)")];
    closed.forEach((d) => { d.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((d) => { d.open = false; }));
})();
