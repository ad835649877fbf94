"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = new Map();
  const FONT = 12;
  const COLOURS = ["#3b82c4", "#d97706", "#5b9a34", "#a855b5", "#0e9aa7", "#b8651b", "#6b7fd7", "#c2476b", "#7a8794"];
  const PASSES = {F: ["forward", "#3b82c4"], B: ["backward", "#d97706"],
                  I: ["gradients of inputs", "#d97706"], W: ["gradients of weights", "#65a30d"]};
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  function colours() {
    const night = dark.matches && !printing;
    return night
      ? {ink: "#e8edf5", soft: "#a7b3c5", line: "#303a4a", paper: "#151b26", idle: "#2b3442", bad: "#f2736b", warn: "#e9a23b", good: "#5fc98a"}
      : {ink: "#0f172a", soft: "#475569", line: "#d8dee8", paper: "#ffffff", idle: "#e5e7eb", bad: "#b3261e", warn: "#b45309", good: "#15803d"};
  }
  const text = value => echarts.format.encodeHTML(String(value));
  const seconds = s => s >= 1 ? `${s.toPrecision(4)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} us`;
  const whole = n => Math.round(n).toLocaleString("en-US");
  const gigabytes = b => b >= 1e8 ? `${(b / 1e9).toLocaleString("en-US", {maximumFractionDigits: 2})} GB` : `${(b / 1e6).toPrecision(3)} MB`;
  const sum = values => values.reduce((total, value) => total + value, 0);

  function base(c, extra) {
    return {
      animation: false, color: COLOURS, backgroundColor: "transparent",
      textStyle: {color: c.ink, fontSize: FONT, fontFamily: "system-ui, 'Helvetica Neue', Arial, sans-serif"},
      tooltip: {confine: true, backgroundColor: c.paper, borderColor: c.line, textStyle: {color: c.ink, fontSize: 13}},
      ...extra,
    };
  }
  function axis(c, extra) {
    const {axisLabel, ...others} = extra;
    return {
      nameTextStyle: {color: c.soft, fontSize: FONT}, axisLine: {lineStyle: {color: c.line}},
      splitLine: {lineStyle: {color: c.line}}, nameLocation: "middle",
      axisLabel: {color: c.soft, fontSize: FONT, hideOverlap: true, ...axisLabel}, ...others,
    };
  }
  const legend = (c, names) => ({top: 0, left: "center", itemWidth: 14, itemHeight: 10, itemGap: 12, data: names,
    textStyle: {color: c.ink, fontSize: FONT}});
  // Pixels that a legend of these names takes, in as many lines as it needs.
  function legendHeight(names, width) {
    let lines = 1, used = 0;
    for (const name of names) {
      const wide = 36 + 7.5 * name.length;
      if (used && used + wide > width - 10) { lines += 1; used = 0; }
      used += wide;
    }
    return 22 * lines + 6;
  }

  // A chart is a function of (colours, width) that returns an option of the library.
  const drawn = {
    breakdown(c, width) {
      const parts = [...figures.breakdown].sort((a, b) => a.seconds - b.seconds);
      const most = parts[parts.length - 1].seconds;
      return base(c, {
        grid: {left: 125, right: width < 500 ? 70 : 130, top: 6, bottom: 42},
        xAxis: axis(c, {type: "value", name: "seconds of the step", nameGap: 26, max: most, splitNumber: width < 500 ? 2 : 5, axisLabel: {showMaxLabel: false}}),
        yAxis: axis(c, {type: "category", data: parts.map(part => part.name), axisLabel: {interval: 0, width: 115, overflow: "break", lineHeight: 12, hideOverlap: false}}),
        series: [{type: "bar", data: parts.map(part => part.seconds), barMaxWidth: 18,
          label: {show: true, position: "right", color: c.ink, fontSize: FONT,
            formatter: item => width < 500 ? parts[item.dataIndex].share : `${parts[item.dataIndex].shown}, ${parts[item.dataIndex].share}`}}],
      });
    },
    waterfall(c, width) {
      const bars = [...figures.waterfall.bars].reverse();
      const names = bars.map(bar => bar.name);
      const room = Math.min(300, width * 0.42);
      return base(c, {
        grid: {left: room + 10, right: 78, top: 6, bottom: 42},
        tooltip: {...base(c, {}).tooltip, trigger: "item", formatter: item => `${text(names[item.dataIndex])}<br>${text(bars[item.dataIndex].words)}`},
        xAxis: axis(c, {type: "value", name: "seconds of a step", nameGap: 26, splitNumber: width < 500 ? 2 : 5}),
        yAxis: axis(c, {type: "category", data: names, axisLabel: {interval: 0, width: room, overflow: "break", lineHeight: 13, hideOverlap: false}}),
        series: [
          {type: "bar", stack: "s", silent: true, itemStyle: {color: "transparent"}, data: bars.map(bar => Math.min(bar.from_s, bar.to_s))},
          {type: "bar", stack: "s", barMaxWidth: 20, data: bars.map(bar => ({value: Math.abs(bar.to_s - bar.from_s),
            itemStyle: {color: bar.whole ? COLOURS[0] : bar.to_s > bar.from_s ? c.bad : c.good}})),
            label: {show: true, position: "right", color: c.ink, fontSize: FONT, formatter: item => bars[item.dataIndex].label}},
        ],
      });
    },
    pipeline(c, width) {
      const pipeline = figures.pipeline;
      const kinds = pipeline.kinds.map(kind => PASSES[kind][0]).concat("idle");
      const spans = pipeline.phases.map(phase => phase.end_s - phase.begin_s);
      const left = 62, gap = width < 500 ? 10 : 24, room = width - left - 12 - gap * (spans.length - 1);
      const isNarrow = width < 500, least = spans.length > 1 ? isNarrow ? 0.3 : 0.2 : 0, head = isNarrow && spans.length > 1 ? 36 : 24;
      const wide = spans.map(span => Math.max(span / sum(spans), least));
      const ranks = pipeline.busy_s.map((_, rank) => rank);
      const option = base(c, {grid: [], xAxis: [], yAxis: [], series: [], title: [],
        legend: legend(c, kinds)});
      option.tooltip.formatter = item => text(item.data.words || "");
      const under = legendHeight(kinds, width);
      let x = left;
      pipeline.phases.forEach((phase, index) => {
        const share = room * wide[index] / sum(wide);
        option.grid.push({left: x, width: share, top: under + head, bottom: 40, show: true, backgroundColor: c.idle, borderColor: c.line});
        option.title.push({text: phase.name, left: x, top: under, textStyle: {fontSize: isNarrow ? 12 : 13, fontWeight: 600, color: c.ink, width: share, overflow: "break", lineHeight: 14}});
        option.xAxis.push(axis(c, {type: "value", gridIndex: index, min: phase.begin_s, max: phase.end_s, name: index ? "" : "seconds", nameGap: 22,
          splitLine: {show: false}, splitNumber: 2,
          axisLabel: {showMinLabel: true, showMaxLabel: false, alignMinLabel: "left", alignMaxLabel: "right", formatter: s => String(Number(s.toPrecision(3)))}}));
        option.yAxis.push(axis(c, {type: "category", gridIndex: index, inverse: true, data: ranks.map(rank => `rank ${rank}`),
          axisLabel: {show: index === 0}, axisTick: {show: false}}));
        for (const kind of pipeline.kinds) {
          option.series.push({type: "custom", name: PASSES[kind][0], itemStyle: {color: PASSES[kind][1]}, xAxisIndex: index, yAxisIndex: index, clip: true,
            progressive: 0, encode: {x: [1, 2], y: 0},
            data: phase.passes.filter(pass => pass[1] === kind).map(([rank, , batch, chunk, begin, end]) => ({
              value: [rank, begin, end], words: `${PASSES[kind][0]} of micro-batch ${batch}, chunk ${chunk}, on rank ${rank}: ${seconds(end - begin)} from ${seconds(begin)}`})),
            renderItem(params, api) {
              const [x0, y] = api.coord([api.value(1), api.value(0)]);
              const x1 = api.coord([api.value(2), api.value(0)])[0];
              const height = api.size([0, 1])[1];
              return {type: "rect", shape: {x: x0, y: y - height / 2 + 0.5, width: Math.max(x1 - x0 - 0.4, 0.4), height: Math.max(height - 1, 0.5)}, style: {fill: api.visual("color")}};
            }});
        }
        x += share + gap;
      });
      option.series.push({type: "custom", name: "idle", itemStyle: {color: c.idle}, data: [], renderItem: () => null});
      return option;
    },
    memory(c, width) {
      const {parts, stages, usable_gib: usable, hbm_gib: hbm} = figures.memory;
      const totals = stages.map(stage => sum(parts.map(part => stage[part] || 0)));
      const every = Math.max(1, Math.ceil(stages.length * 40 / (width - 190)));
      const top = Math.ceil(Math.max(hbm, ...totals) * 1.12 / 10) * 10;
      // Beside the bars, above and below one another where the two lines are close.
      const apart = (hbm - usable) / top * 240 < 16 ? 16 : 0;
      const mark = (value, words, ink, padding) => ({yAxis: value, lineStyle: {color: ink, type: "dashed"},
        label: {formatter: `${words} ${value.toFixed(1)}`, color: ink, fontSize: FONT, position: "end", padding}});
      return base(c, {
        legend: legend(c, parts), grid: {left: 52, right: 86, top: legendHeight(parts, width) + 14, bottom: 40},
        tooltip: {...base(c, {}).tooltip, trigger: "axis", valueFormatter: value => `${Number(value).toFixed(2)} GiB`},
        xAxis: axis(c, {type: "category", name: "pipeline stage", nameGap: 24, data: stages.map((_, stage) => String(stage))}),
        yAxis: axis(c, {type: "value", name: "GiB on a GPU", nameGap: 36, max: top}),
        series: parts.map((part, index) => ({type: "bar", stack: "memory", name: part, barMaxWidth: 46, data: stages.map(stage => stage[part] || 0),
          ...(index === parts.length - 1 ? {
            label: {show: true, position: "top", fontSize: FONT, fontWeight: 600,
              formatter: item => item.dataIndex % every ? "" : `{${totals[item.dataIndex] > usable ? "bad" : totals[item.dataIndex] > 0.9 * usable ? "warn" : "calm"}|${totals[item.dataIndex].toFixed(1)}}`,
              rich: Object.fromEntries([["bad", c.bad], ["warn", c.warn], ["calm", c.soft]].map(([name, ink]) => [name, {color: ink, fontSize: FONT, fontWeight: 600}]))},
          } : {}),
          ...(index === 0 ? {markLine: {silent: true, symbol: "none", data: [
            mark(usable, "usable", c.bad, [apart, 0, 0, 0]), mark(hbm, "HBM", c.soft, [0, 0, apart, 0])]}} : {})})),
      });
    },
    levels(c, width) {
      const {levels} = figures.traffic, axes = [...new Set(levels.flatMap(level => Object.keys(level.by_axis)))].sort();
      return base(c, {
        legend: legend(c, axes), grid: {left: 100, right: 66, top: legendHeight(axes, width) + 4, bottom: 40},
        tooltip: {...base(c, {}).tooltip, trigger: "axis", valueFormatter: value => value ? gigabytes(value * 1e9) : "nothing"},
        xAxis: axis(c, {type: "value", name: "GB that one GPU sends in a step", nameGap: 22, splitNumber: width < 500 ? 2 : 4}),
        yAxis: axis(c, {type: "category", inverse: true, data: levels.map(level => level.level), axisLabel: {width: 90, overflow: "break", interval: 0, hideOverlap: false}}),
        series: axes.map((name, index) => ({type: "bar", stack: "bytes", name, barMaxWidth: 26, data: levels.map(level => (level.by_axis[name] || 0) / 1e9),
          ...(index === axes.length - 1 ? {label: {show: true, position: "right", color: c.ink, fontSize: FONT,
            formatter: item => `${(100 * levels[item.dataIndex].utilisation).toFixed(1)} %`}} : {})})),
      });
    },
    matrix(c) {
      const {bytes, unit, per_block: size} = figures.traffic.matrix;
      const names = bytes.map((_, block) => size === 1 ? `${unit} ${block}` : `${unit}s ${block * size}-${block * size + size - 1}`);
      const cells = bytes.flatMap((row, from) => row.map((value, to) => [to, from, value > 0 ? Math.log10(value) : null, value])).filter(cell => cell[3] > 0);
      const logs = cells.map(cell => cell[2]);
      return base(c, {
        grid: {left: 104, right: 14, top: 8, bottom: 84},
        tooltip: {...base(c, {}).tooltip, formatter: item => `${text(names[item.value[1]])} to ${text(names[item.value[0]])}: ${gigabytes(item.value[3])}`},
        xAxis: axis(c, {type: "category", data: names, name: "to", nameGap: 6, axisLabel: {show: false}, axisTick: {show: false}}),
        yAxis: axis(c, {type: "category", data: names, inverse: true, axisTick: {show: false}, axisLabel: {interval: Math.ceil(names.length * 16 / 308) - 1}}),
        visualMap: {type: "continuous", min: Math.min(...logs), max: Math.max(...logs, Math.min(...logs) + 0.001), dimension: 2, orient: "horizontal", left: "center", bottom: 0, itemHeight: 130,
          text: [gigabytes(10 ** Math.max(...logs)), gigabytes(10 ** Math.min(...logs))], textStyle: {color: c.soft, fontSize: FONT}, inRange: {color: ["#dbe7f5", "#3b82c4", "#12304f"]}},
        series: [{type: "heatmap", progressive: 0, data: cells, itemStyle: {borderWidth: 0}}],
      });
    },
    roofline(c, width) {
      const roof = figures.roofline, slope = roof.hbm_gb_per_s / 1e3, ridge = roof.peak_tflops / slope;
      const low = 10 ** Math.floor(Math.log10(Math.min(ridge / 10, ...roof.products.map(point => point.flop_per_byte))));
      const high = 10 ** Math.ceil(Math.log10(Math.max(ridge * 4, ...roof.products.map(point => point.flop_per_byte))));
      const names = roof.products.map(point => point.name);
      return base(c, {
        legend: legend(c, names), grid: {left: 62, right: 20, top: legendHeight(names, width) + 8, bottom: 44},
        tooltip: {...base(c, {}).tooltip, formatter: item => text(item.data.words || "")},
        xAxis: axis(c, {type: "log", min: low, max: high, name: "FLOP per byte", nameGap: 26}),
        yAxis: axis(c, {type: "log", name: "TFLOP/s of one GPU", nameGap: 42}),
        series: [
          {type: "line", name: "roof", silent: true, symbol: "none", lineStyle: {color: c.soft, width: 2}, data: [[low, low * slope], [ridge, roof.peak_tflops], [high, roof.peak_tflops]]},
          ...roof.products.map(point => ({type: "scatter", name: point.name, symbolSize: 13,
            data: [{value: [point.flop_per_byte, point.tflops], words: `${point.name}: ${point.tflops.toFixed(0)} TFLOP/s at ${point.flop_per_byte.toFixed(0)} FLOP per byte, [${point.shape.map(whole).join(", ")}]${point.groups > 1 ? ` x ${whole(point.groups)}` : ""}`}]})),
        ],
      });
    },
    near(c) {
      const dot = layout => ({value: [layout.step_time_s, layout.memory_gib], words: `${seconds(layout.step_time_s)}, ${layout.memory_gib.toFixed(1)} GiB`, layout: layout.words});
      const front = figures.near.layouts.filter(layout => layout.on_front), plan = figures.near.layouts.filter(layout => layout.is_plan);
      return base(c, {
        legend: legend(c, ["layouts", "Pareto front", "the plan"]), grid: {left: 56, right: 20, top: 40, bottom: 44},
        tooltip: {...base(c, {}).tooltip, formatter: item => `${text(item.data.layout)}<br>${text(item.data.words)}`},
        // The first label begins at the axis: in its middle it would meet the lowest of the other axis.
        xAxis: axis(c, {type: "value", scale: true, name: "seconds of a step", nameGap: 26, axisLabel: {showMinLabel: true, alignMinLabel: "left"}}),
        yAxis: axis(c, {type: "value", scale: true, name: "GiB of the fullest GPU", nameGap: 38}),
        series: [
          {type: "scatter", name: "layouts", symbolSize: 8, itemStyle: {opacity: 0.7}, data: figures.near.layouts.filter(layout => !layout.on_front && !layout.is_plan).map(dot)},
          {type: "line", name: "Pareto front", step: "end", symbolSize: 9, data: front.map(dot)},
          {type: "scatter", name: "the plan", symbol: "diamond", symbolSize: 18, z: 5, itemStyle: {color: c.bad}, data: plan.map(dot)},
        ],
      });
    },
    variants(c, width) {
      const chosen = choice(), moved = figures.what_if.axes[state.moved];
      const rows = moved.values.map(value => rowOf({...chosen, [moved.name]: value}));
      return base(c, {
        grid: {left: 74, right: 14, top: 30, bottom: 44},
        tooltip: {...base(c, {}).tooltip, formatter: item => text(item.data.words)},
        xAxis: axis(c, {type: "category", name: moved.title, nameGap: 26, data: moved.shown}),
        yAxis: axis(c, {type: "value", name: "tokens/s", nameGap: 58, axisLabel: {formatter: whole}}),
        series: [{type: "bar", barMaxWidth: 60, label: {show: width >= 320, position: "top", color: c.ink, fontSize: FONT, formatter: item => item.data.label},
          data: rows.map((row, index) => ({value: row && row.tokens_per_s || 0, label: row ? row.shown.step ? `${row.shown.step} a step` : "no plan" : "not planned",
            words: row ? `${moved.shown[index]}: ${row.shown.step || row.message}; ${row.shown.layout || ""}` : "not planned",
            itemStyle: {color: moved.values[index] === chosen[moved.name] ? COLOURS[1] : COLOURS[0]}}))}],
      });
    },
  };

  // What-if: one control for each option, over rows that were planned beforehand.
  const state = {moved: 0, values: {}};
  const controls = () => [...document.querySelectorAll("#controls select")];
  const keyOf = values => figures.what_if.axes.map(axisOf => values[axisOf.name]).join("|");
  let rowsByKey = new Map();
  const rowOf = values => rowsByKey.get(keyOf(values));
  const choice = () => ({...state.values});

  // Options that were not planned together with the other choices are grey and cannot be chosen.
  function grey() {
    for (const [at, axisOf] of figures.what_if.axes.entries()) {
      [...controls()[at].options].forEach((option, index) => {
        option.disabled = !rowOf({...state.values, [axisOf.name]: axisOf.values[index]});
      });
    }
  }
  function show() {
    const row = rowOf(state.values);
    for (const cell of document.querySelectorAll("[data-figure]")) {
      cell.textContent = row ? row.shown[cell.dataset.figure] || "-" : "-";
    }
    document.getElementById("what-if-status").textContent = row ? row.shown.status : "";
    grey();
    draw("variants");
  }
  function move(index) {
    const {name, values} = figures.what_if.axes[index];
    state.moved = index;
    state.values[name] = values[controls()[index].value];
    show();
  }
  function reset() {
    for (const [at, axisOf] of figures.what_if.axes.entries()) {
      state.values[axisOf.name] = axisOf.values[axisOf.now];
      controls()[at].value = String(axisOf.now);
    }
    show();
  }

  // The ranks on the fabric: pods hold leaves, leaves hold nodes, nodes hold GPUs, and lines wrap.
  const EMPTY = "#e2e8f0";
  const bytesOf = colour => [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  function rampColour(place, parts) {
    const ramp = figures.fabric.ramp, x = (ramp.length - 1) * place / Math.max(1, parts - 1);
    const low = Math.min(Math.floor(x), ramp.length - 2), ends = [bytesOf(ramp[low]), bytesOf(ramp[low + 1])];
    return `#${ends[0].map((first, at) => Math.round(first + (ends[1][at] - first) * (x - low)).toString(16).padStart(2, "0")).join("")}`;
  }
  // Black or white, whichever stands out more (relative luminance, WCAG 2).
  function inkOn(colour) {
    const [r, g, b] = bytesOf(colour).map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
  }
  function element(kind, within, words) {
    const made = document.createElement("div");
    made.className = kind;
    if (words) { made.textContent = words; }
    within.append(made);
    return made;
  }
  const nodesWords = count => `${whole(count)} ${count === 1 ? "node" : "nodes"}`;
  function placesWords(ranks) {
    return Object.entries(figures.fabric.axes).map(([name, {places}]) => {
      const values = [...new Set(ranks.map(rank => places[rank]))].sort((a, b) => a - b);
      return `${name} ${values.length > 1 ? `${values[0]}-${values[values.length - 1]}` : values[0]}`;
    }).join(", ");
  }
  // A cell for many GPUs: a strip for each colour, as wide as its share.
  function strips(ranks, axisOf) {
    const shares = new Map();
    for (const rank of ranks) {
      const colour = rank < 0 ? EMPTY : rampColour(axisOf.places[rank], axisOf.parts);
      shares.set(colour, (shares.get(colour) || 0) + 1);
    }
    let done = 0;
    const stops = [...shares].map(([colour, count]) => {
      const begin = done;
      done += 100 * count / ranks.length;
      return `${colour} ${begin}% ${done}%`;
    });
    return stops.length > 1 ? `linear-gradient(90deg, ${stops.join(", ")})` : stops[0].split(" ")[0];
  }
  function cell(kind, within, ranks, title, axisOf) {
    const made = element(kind, within);
    const used = ranks.filter(rank => rank >= 0);
    made.title = used.length ? `${title}: ${used.length > 1 ? `${used.length} ranks` : `rank ${used[0]}`}, ${placesWords(used)}` : `${title}: not used`;
    made.style.background = strips(ranks, axisOf);
    return made;
  }
  function drawFabric() {
    const place = document.getElementById("fabric");
    if (!place) { return; }
    const {unit, ranks: isNumbered, titles, pods, axes} = figures.fabric, axisOf = axes[document.getElementById("rank-axis").value];
    place.replaceChildren();
    place.className = `unit-${unit}${isNumbered ? " numbered" : ""}${titles ? "" : " untitled"}`;
    for (const pod of pods) {
      const podBox = element("pod", place);
      if (pod.name) { element("pod-name", podBox, `${pod.name}, ${nodesWords(sum(pod.leaves.map(leaf => leaf.nodes.length)))}`); }
      const leaves = element("leaves", podBox);
      for (const leaf of pod.leaves) {
        const box = element("leaf", leaves);
        const words = leaf.name ? `${leaf.name}, ${leaf.nodes.length}` : nodesWords(leaf.nodes.length);
        box.title = words;
        if (titles && unit !== "leaf") { element("leaf-name", box, words); }
        const nodes = element("nodes", box);
        if (unit === "leaf") { cell("bar-cell", nodes, leaf.nodes.flatMap(([, on]) => on), words, axisOf); continue; }
        for (const [name, on] of leaf.nodes) {
          if (unit === "node") { cell("tile", nodes, on, name, axisOf); continue; }
          const node = element("node", nodes);
          element("node-name", node, name);
          const gpus = element("gpus", node);
          on.forEach((rank, gpu) => {
            const made = cell("gpu", gpus, [rank], `${name} GPU ${gpu}`, axisOf);
            if (isNumbered && rank >= 0) {
              made.textContent = rank;
              made.style.color = inkOn(rampColour(axisOf.places[rank], axisOf.parts));
            }
          });
        }
      }
    }
    drawFabricLegend(axisOf, pods);
  }
  function drawFabricLegend(axisOf, pods) {
    const legendBox = document.getElementById("fabric-legend"), many = axisOf.parts > 16;
    legendBox.replaceChildren();
    const shown = many ? [0, axisOf.parts - 1] : Array.from({length: axisOf.parts}, (_, at) => at);
    const swatch = (colour, words) => { element("swatch", legendBox).style.background = colour; element("", legendBox, words); };
    if (many) {
      const steps = Array.from({length: 33}, (_, at) => rampColour(at, 33));
      element("", legendBox, String(shown[0]));
      element("ramp", legendBox).style.background = `linear-gradient(90deg, ${steps.join(", ")})`;
      element("", legendBox, String(shown[1]));
    } else {
      for (const at of shown) { swatch(rampColour(at, axisOf.parts), String(at)); }
    }
    if (pods.some(pod => pod.leaves.some(leaf => leaf.nodes.some(([, on]) => on.includes(-1))))) { swatch(EMPTY, "not used"); }
  }

  function draw(name) {
    const place = document.getElementById(`chart-${name}`);
    if (!place || !place.clientWidth) { return; }
    let chart = charts.get(name);
    if (!chart) {
      chart = echarts.init(place, null, {renderer: "svg"});
      charts.set(name, chart);
    }
    chart.resize();
    chart.setOption(drawn[name](colours(), place.clientWidth), {notMerge: true});
  }
  const names = () => [...document.querySelectorAll(".chart")].map(place => place.id.slice("chart-".length));
  const drawAll = () => names().forEach(draw);
  function drawInTurn(waiting) {
    if (!waiting.length) {
      document.documentElement.dataset.drawn = String(Math.round(performance.now()));
      return;
    }
    draw(waiting[0]);
    setTimeout(drawInTurn, 0, waiting.slice(1));
  }

  if (figures.what_if) {
    rowsByKey = new Map(figures.what_if.rows.map(row => [keyOf(row.values), row]));
    controls().forEach((control, index) => control.addEventListener("change", () => move(index)));
    document.getElementById("what-if-reset").addEventListener("click", reset);
    reset();
  }
  const rankAxis = document.getElementById("rank-axis");
  if (rankAxis) { rankAxis.addEventListener("change", drawFabric); }
  dark.addEventListener("change", drawAll);
  let wait = 0;
  window.addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(drawAll, 100); });
  window.addEventListener("beforeprint", () => { printing = true; drawAll(); });
  window.addEventListener("afterprint", () => { printing = false; drawAll(); });
  drawFabric();
  drawInTurn(names());
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
