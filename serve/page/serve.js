"use strict";
(() => {
  const at = id => document.getElementById(id);
  const form = at("question");
  const POLL_MS = 200;
  const MEASURES = [["step_time_s", "seconds of a step"], ["tokens_per_s", "tokens/s"],
    ["tokens_per_s_per_gpu", "tokens/s of a GPU"], ["days", "days of the training"],
    ["dollars", "dollars of the training"], ["kwh", "kWh of the GPUs"]];
  const TEXTS = ["tokens", "days", "gpu_hour_price", "reserve_gib", "memory_risk", "time_limit", "lora_rank", "lora_targets"];
  const RISES_WELL = new Set(["tokens_per_s", "mfu"]);
  let offer = null, plan = null, variant = null, sizes = null, chart = null;
  const plans = [];
  const running = {};

  // Requests. Addresses are relative: the token stands in the page's own.

  async function request(path, method, body) {
    let response;
    try {
      response = await fetch(path, {method, body: body === undefined ? undefined : JSON.stringify(body),
        headers: body === undefined ? {} : {"Content-Type": "application/json"}});
    } catch {
      throw {message: "meshwright serve does not answer any more: start it again."};
    }
    const document = await response.json();
    if (!response.ok) throw document.error;
    return document;
  }
  const wait = ms => new Promise(resolve => setTimeout(resolve, ms));

  // Asks, and hears how it gets on; of each role one question is worked on, a new one ends the last.
  async function ask(role, kind, fields, hear) {
    stop(role);
    const mine = running[role] = {id: null};
    let ticket = await request(`ask/${kind}`, "POST", fields);
    mine.id = ticket.id;
    while (ticket.state === "waiting" || ticket.state === "working") {
      if (running[role] !== mine) { end(mine); return null; }
      hear(ticket);
      await wait(POLL_MS);
      ticket = await request(`answers/${ticket.id}`, "GET");
    }
    if (running[role] !== mine) return null;
    delete running[role];
    if (ticket.state === "failed") throw ticket.error;
    return ticket.state === "done" ? ticket : null;
  }
  function end(job) {
    if (job.id) request(`answers/${job.id}`, "DELETE").catch(() => {});
  }
  function stop(role) {
    const job = running[role];
    delete running[role];
    if (job) end(job);
  }
  function progressWords(ticket) {
    const seconds = `${ticket.elapsed_s.toFixed(1)} s`;
    if (ticket.state === "waiting") return `waits for ${ticket.ahead + 1} before it, ${seconds}`;
    return ticket.words ? `${seconds}: ${ticket.words}` : seconds;
  }

  // The question.

  function fill(select, values) {
    select.replaceChildren(...values.map(value => typeof value === "string" ? new Option(value) : new Option(value[1], value[0])));
  }
  function suggest(list, values) {
    list.replaceChildren(...values.map(value => Object.assign(document.createElement("option"), {value})));
  }
  function wordsOf(name) {
    return [...form.querySelectorAll(`#words input[name="${name}"]:checked`)].map(box => box.value);
  }
  function question() {
    const value = name => form.elements[name].value.trim();
    const fields = {model: value("model"), cluster: value("cluster"), global_batch: value("global_batch"),
      seq_len: value("seq_len"), precision: value("precision"), framework: value("framework"),
      optimizer: value("optimizer"), train: value("train"), robustness: form.elements.robustness.checked};
    if (value("gpus")) fields.gpus = value("gpus");
    for (const name of TEXTS) if (value(name)) fields[name] = value(name);
    for (const name of Object.keys(offer.words)) {
      const words = wordsOf(name);
      if (words.length) fields[name] = words;
    }
    return fields;
  }
  function showError(error) {
    const place = at("error");
    place.textContent = error.message || String(error);
    place.hidden = false;
    const names = [error.where, ...(place.textContent.match(/^(?:question: )?(?:--)?([\w-]+)/) || []).slice(1)];
    const field = names.filter(Boolean).map(name => form.elements[name.replace(/^--/, "").replaceAll("-", "_")]).find(element => element && element.focus);
    if (field) {
      if (field.closest("details")) field.closest("details").open = true;
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", "error");
      field.focus();
    }
  }
  function clearError() {
    at("error").hidden = true;
    for (const field of form.querySelectorAll("[aria-invalid]")) {
      field.removeAttribute("aria-invalid");
      if (field.name === "cluster") field.setAttribute("aria-describedby", "cluster-words");
      else field.removeAttribute("aria-describedby");
    }
  }
  function busy(on) {
    at("progress").hidden = !on;
    if (!on) at("progress-words").textContent = "";
  }
  async function inForeground(kind, fields, hear) {
    clearError();
    busy(true);
    let stopped = false;
    try {
      const ticket = await ask("main", kind, fields, state => {
        at("progress-words").textContent = progressWords(state);
        if (hear) hear(state);
      });
      stopped = ticket === null;
      return ticket;
    } catch (error) {
      showError(error);
      return null;
    } finally {
      if (!stopped || !running.main) busy(false);
    }
  }
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const fields = question(), find = form.elements.find.value;
    if (find === "by_days") fields.by_days = true;
    else if (find) fields[find] = form.elements.target.value.trim();
    if (find) delete fields.robustness;
    const ticket = await inForeground(find ? "fewest" : "plan", fields);
    if (!ticket) return;
    if (ticket.answer.title === undefined) {
      at("error").hidden = false;
      at("error").textContent = new DOMParser().parseFromString(ticket.answer.verdict, "text/html").body.textContent;
      return;
    }
    const {step_time_s, tokens_per_s, by_days, ...asked} = fields;
    takePlan(remember(ticket, {...asked, ...(find ? {gpus: ticket.answer.gpus} : {})}));
  });
  at("stop").addEventListener("click", () => { stop("main"); busy(false); at("plan-button").focus(); });
  form.elements.find.addEventListener("change", () => {
    const find = form.elements.find.value;
    at("target-field").hidden = !["step_time_s", "tokens_per_s"].includes(find);
    at("gpus-words").textContent = find ? "GPUs, at most" : "GPUs";
    if (find === "by_days") at("more").open = true;
  });
  function describeCluster() {
    const cluster = offer.clusters.find(each => each.name === form.elements.cluster.value.trim());
    at("cluster-words").textContent = !cluster ? "" : `${cluster.name}: nodes of ${cluster.gpus_per_node} ${cluster.device}, ` +
      (cluster.any_size ? "any number of them." : `${cluster.gpus.toLocaleString("en-US")} GPUs in all.`);
    const most = cluster ? cluster.gpus : 131072, counts = [];
    for (let count = cluster ? cluster.gpus_per_node : 8; count <= most; count *= 2) counts.push(String(count));
    suggest(at("counts"), counts);
  }
  form.elements.cluster.addEventListener("input", describeCluster);

  // Plans.

  function remember(ticket, fields) {
    const entry = {id: ticket.id, fields, ...ticket.answer};
    plans.push(entry);
    const pins = Object.entries(entry.pins).map(([name, value]) => `${name}=${value}`).join(", ");
    const step = entry.cards.length ? entry.cards[0][2] : entry.status;
    entry.label = `${plans.length}: ${step}${pins ? `, ${pins}` : ""}; ${entry.title}`;
    const [first, second] = [at("first"), at("second")];
    for (const select of [first, second]) select.append(new Option(entry.label, entry.id));
    if (plans.length > 1) {
      at("compare").hidden = false;
      second.value = entry.id;
      if (plan) first.value = plan.id;
    }
    return entry;
  }
  function card(words, value, change) {
    const place = document.createElement("div"), strong = document.createElement("b"), small = document.createElement("span");
    place.className = "card";
    strong.textContent = value;
    small.textContent = words;
    place.append(strong, small);
    if (change) place.append(change);
    return place;
  }
  function changeOf(name, before, after) {
    if (!before || !after || !["step_time_s", "tokens_per_s", "days", "dollars", "kwh", "peak_memory_gib"].includes(name)) return null;
    const share = after / before - 1, place = document.createElement("span");
    const plain = Math.abs(share) < 5e-4;
    place.className = `change ${plain ? "" : (share > 0) === RISES_WELL.has(name) ? "better" : "worse"}`;
    place.textContent = plain ? "as the plan" : `${share > 0 ? "+" : "-"}${Math.abs(100 * share).toFixed(1)} %`;
    return place;
  }
  function cards(place, entry, base) {
    place.replaceChildren(card("proof", entry.proof), ...entry.cards.map(([name, words, value]) =>
      card(words, value, base && changeOf(name, base.figures[name], entry.figures[name]))));
  }
  function details(title, html) {
    const place = document.createElement("details"), summary = document.createElement("summary"), wide = document.createElement("div");
    summary.textContent = title;
    wide.className = "wide";
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", title);
    wide.innerHTML = html;
    place.append(summary, wide);
    return place;
  }
  function takePlan(entry) {
    plan = entry;
    at("plan").hidden = false;
    at("plan-title").textContent = entry.title;
    at("plan-verdict").innerHTML = entry.verdict || "";
    at("plan-layout").textContent = entry.layout || "There is no plan.";
    cards(at("plan-cards"), entry);
    at("plan-warnings").replaceChildren(...entry.warnings.map(words => Object.assign(document.createElement("li"), {textContent: words})));
    at("plan-first").innerHTML = entry.first;
    at("plan-sections").replaceChildren(...entry.sections.map(section => details(section.title, section.html)));
    const shut = !entry.layout && entry.sections.length;
    if (shut) at("plan-sections").firstChild.open = true;
    at("get-yaml").href = `answers/${entry.id}/plan.yaml`;
    at("get-json").href = `answers/${entry.id}/plan.json`;
    for (const id of ["get-launch", "get-report", "launch-target"]) at(id).disabled = !entry.layout;
    at("launch-target").value = entry.fields.framework;
    at("file-words").textContent = "";
    at("what-if").hidden = false;
    showPins(entry);
    at("plan-title").focus();
  }
  async function fetchFile(kind, name, fields) {
    at("file-words").textContent = `${name} is being written`;
    try {
      const ticket = await ask("files", kind, fields, state => { at("file-words").textContent = `${name}: ${progressWords(state)}`; });
      if (!ticket) return null;
      at("file-words").textContent = "";
      return `answers/${ticket.id}/${name}`;
    } catch (error) {
      at("file-words").textContent = error.message;
      return null;
    }
  }
  at("get-launch").addEventListener("click", async () => {
    const address = await fetchFile("launch", "launch.zip", {plan: plan.id, target: at("launch-target").value});
    if (!address) return;
    Object.assign(document.createElement("a"), {href: address, download: "launch.zip"}).click();
    at("file-words").textContent = "launch.zip is in your downloads.";
  });
  at("get-report").addEventListener("click", async () => {
    const address = await fetchFile("report", "report.html", {plan: plan.id});
    if (!address) return;
    const link = Object.assign(document.createElement("a"), {href: address, target: "_blank", rel: "noopener", textContent: "Open the report"});
    at("file-words").replaceChildren(link);
    link.focus();
  });

  // What if: any choices fixed, the rest searched.

  function showPins(entry) {
    variant = null;
    at("take").disabled = true;
    at("what-if-words").textContent = "";
    at("what-if-cards").replaceChildren();
    at("what-if-answer").replaceChildren();
    for (const control of at("pins").querySelectorAll("[data-pin], [data-ask]")) {
      const {pin, ask: asked} = control.dataset;
      const planned = pin ? entry.choices[pin] : asked === "gpus" ? entry.gpus : entry.fields[asked];
      const words = planned === undefined ? "free" : `${planned}, planned`;
      if (control.tagName === "SELECT") control.options[0].text = words;
      else control.placeholder = words;
      control.value = pin && entry.pins[pin] !== undefined ? String(entry.pins[pin]) : "";
      mark(control);
    }
  }
  function mark(control) {
    control.parentElement.classList.toggle("pinned", control.value !== "");
  }
  function pinsNow() {
    return fixed("pin", control => control.tagName === "INPUT" ? Number(control.value) : control.value);
  }
  function fixed(kind, value) {
    const controls = [...at("pins").querySelectorAll(`[data-${kind}]`)].filter(control => control.value !== "");
    return Object.fromEntries(controls.map(control => [control.dataset[kind], value(control)]));
  }
  async function askWhatIf() {
    const place = at("what-if-words");
    at("take").disabled = true;
    try {
      const fields = {...plan.fields, ...fixed("ask", control => control.value), pin: pinsNow(), robustness: false};
      const ticket = await ask("what-if", "plan", fields, state => { place.textContent = progressWords(state); });
      if (!ticket) return;
      variant = remember(ticket, fields);
      place.textContent = variant.layout || "These choices leave no plan:";
      cards(at("what-if-cards"), variant, plan);
      const why = variant.layout ? [] : variant.sections.slice(0, 1).map(section => Object.assign(document.createElement("div"), {innerHTML: section.html}));
      at("what-if-answer").replaceChildren(...why);
      at("take").disabled = !variant.layout;
    } catch (error) {
      place.textContent = error.message;
      at("what-if-cards").replaceChildren();
      at("what-if-answer").replaceChildren();
    }
  }
  function whatIfControl(kind, name, title, words, low, high) {
    const label = document.createElement("label");
    const control = document.createElement(words.length ? "select" : "input");
    control.dataset[kind] = name;
    if (words.length) fill(control, [["", "free"], ...words]);
    else Object.assign(control, {type: "number", min: low, max: high, step: 1});
    control.addEventListener("change", () => { mark(control); askWhatIf(); });
    label.append(title, control);
    return label;
  }
  function makePins() {
    at("pins").replaceChildren(
      whatIfControl("ask", "gpus", "GPUs", [], 1, 1048576),
      whatIfControl("ask", "global_batch", "sequences a step", [], 1, 10000000),
      whatIfControl("ask", "seq_len", "tokens of a sequence", [], 1, 16777216),
      whatIfControl("ask", "precision", "precision", offer.precisions),
      ...offer.pins.map(pin => whatIfControl("pin", pin.name, pin.title, pin.words, pin.low, pin.high)));
  }
  at("unpin").addEventListener("click", () => { stop("what-if"); showPins(plan); });
  at("take").addEventListener("click", () => {
    if (!variant) return;
    for (const name of ["gpus", "global_batch", "seq_len", "precision"]) form.elements[name].value = variant.fields[name] ?? "";
    takePlan(variant);
  });

  // Two plans side by side.

  at("compare-button").addEventListener("click", async () => {
    const place = at("compare-words");
    try {
      const fields = {first: at("first").value, second: at("second").value};
      const ticket = await ask("compare", "compare", fields, state => { place.textContent = progressWords(state); });
      if (!ticket) return;
      place.textContent = "";
      at("comparison").innerHTML = ticket.answer.html;
    } catch (error) {
      place.textContent = error.message;
    }
  });

  // GPUs against time, dollars and kWh.

  at("sizes-button").addEventListener("click", async () => {
    const {robustness, ...fields} = question();
    fields.time_limit = String(offer.limits.time_limit);
    sizes = {rows: []};
    at("sizes-table").replaceChildren();
    at("get-csv").hidden = at("get-svg").hidden = true;
    const ticket = await inForeground("sizes", fields, state => {
      if (state.rows.length > sizes.rows.length) { sizes.rows = state.rows; drawSizes(); }
    });
    if (!ticket) return;
    sizes.rows = ticket.answer.rows;
    at("sizes-table").innerHTML = ticket.answer.html;
    for (const [id, name] of [["get-csv", "sweep.csv"], ["get-svg", "sweep.svg"]]) {
      at(id).href = `answers/${ticket.id}/${name}`;
      at(id).hidden = false;
    }
    drawSizes();
  });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const short = value => value >= 1e4 ? Number(value.toPrecision(4)).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  function drawSizes() {
    at("sizes").hidden = false;
    const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(`--${name}`).trim();
    const has = MEASURES.filter(([name]) => sizes.rows.some(row => row[name]));
    const select = at("measure"), before = select.value;
    fill(select, has);
    if (has.some(([name]) => name === before)) select.value = before;
    const measure = select.value, words = (has.find(([name]) => name === measure) || ["", "no plan at any size"])[1];
    const points = sizes.rows.filter(row => row[measure]);
    const lacking = MEASURES.filter(([name]) => !has.some(([other]) => other === name)).map(([, title]) => title);
    const without = sizes.rows.filter(row => !row.step_time_s).map(row => row.gpus.toLocaleString("en-US"));
    at("sizes-words").textContent = [
      without.length ? `No plan on ${without.join(", ")} GPUs.` : "",
      lacking.length && points.length ? `For ${lacking.join(", ")} give tokens of the training${lacking.length === 1 ? " and a price" : ""}.` : ""].filter(Boolean).join(" ");
    const place = at("chart-sizes");
    place.setAttribute("aria-label", `${words} by GPUs: ${points.map(row => `${row.gpus}: ${short(row[measure])}`).join(", ")}`);
    const narrow = place.clientWidth < 500;
    if (!chart) {
      chart = echarts.init(place, null, {renderer: "svg"});
      chart.on("click", item => { form.elements.gpus.value = points[item.dataIndex].gpus; });
    }
    const axis = {nameLocation: "middle", nameTextStyle: {color: colour("soft"), fontSize: 12}, axisLine: {lineStyle: {color: colour("line")}},
      splitLine: {lineStyle: {color: colour("line")}}, axisLabel: {color: colour("soft"), fontSize: 12, hideOverlap: true, formatter: short}};
    const values = points.map(row => row[measure]), counts = points.map(row => row.gpus);
    const power = (value, round) => 2 ** round(Math.log2(value));
    const span = list => list.length ? {min: power(Math.min(...list), Math.floor), max: Math.max(power(Math.max(...list), Math.ceil), 2 * power(Math.min(...list), Math.floor))} : {};
    chart.resize();
    chart.setOption({
      animation: false, backgroundColor: "transparent", textStyle: {fontFamily: "system-ui, 'Helvetica Neue', Arial, sans-serif", color: colour("ink")},
      tooltip: {confine: true, backgroundColor: colour("paper"), borderColor: colour("line"), textStyle: {color: colour("ink"), fontSize: 13},
        formatter: item => `${short(item.value[0])} GPUs: ${short(item.value[1])} ${echarts.format.encodeHTML(words)}`},
      grid: {left: narrow ? 62 : 84, right: 30, top: 26, bottom: 46},
      xAxis: {...axis, type: "log", logBase: 2, name: "GPUs", nameGap: 28, ...span(counts)},
      yAxis: {...axis, type: "log", logBase: 2, name: words, nameGap: narrow ? 46 : 66, ...span(values)},
      series: [{type: "line", symbolSize: 10, lineStyle: {color: colour("accent"), width: 2}, label: {show: !narrow, position: "top", color: colour("ink"), fontSize: 12, formatter: item => short(item.value[1])},
        data: points.map((row, index) => ({value: [row.gpus, row[measure]], label: {position: index ? "top" : "right"}, symbol: row.status === "optimal" ? "circle" : "emptyCircle", itemStyle: {color: colour("accent")}}))}],
    }, true);
  }
  at("measure").addEventListener("change", drawSizes);
  dark.addEventListener("change", () => { if (sizes) drawSizes(); });
  window.addEventListener("resize", () => { if (sizes) drawSizes(); });

  // What the controls offer.

  (async () => {
    try {
      offer = await request("offer", "GET");
    } catch (error) {
      showError(error);
      return;
    }
    suggest(at("models"), offer.models);
    suggest(at("clusters"), offer.clusters.map(cluster => cluster.name));
    fill(form.elements.precision, offer.precisions);
    fill(form.elements.framework, offer.frameworks);
    fill(form.elements.optimizer, offer.optimizers);
    fill(form.elements.train, offer.train);
    fill(at("launch-target"), offer.targets);
    form.elements.time_limit.max = offer.limits.time_limit;
    const titles = {forbid: "forbidden", without: "software that is not there", allow: "allowed", inside_domain: "inside one NVLink domain"};
    at("words").replaceChildren(...Object.entries(offer.words).map(([name, words]) => {
      const group = document.createElement("fieldset"), legend = document.createElement("legend"), row = document.createElement("div");
      legend.textContent = titles[name];
      row.className = "words";
      row.append(...words.map(word => {
        const label = document.createElement("label"), box = Object.assign(document.createElement("input"), {type: "checkbox", name, value: word});
        label.append(box, word);
        return label;
      }));
      group.append(legend, row);
      return group;
    }));
    makePins();
    describeCluster();
    document.documentElement.dataset.ready = performance.now().toFixed(0);
  })();
})();
