import { markdown } from "/static/markdown.js";

const $ = (id) => document.getElementById(id);
const STARTERS = ["And it came to pass", "Who made the heavens and the earth?", "Speak to me of love and war."];

// ---- the conversation

const chat = { messages: [], controller: null };

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(label, onClick) {
  const made = element("button", "", label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

function showUser(text) {
  const turn = element("article", "turn user");
  turn.setAttribute("aria-label", "You");
  turn.append(element("div", "text", text));
  $("talk").append(turn);
}

// One answer as it grows. Drawing waits for the next frame, however many tokens came since the last one.
class AnswerView {
  constructor() {
    this.reasoning = "";
    this.content = "";
    this.began = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.turn = element("article", "turn assistant");
    this.turn.setAttribute("aria-label", "Model");
    this.thoughts = element("details", "thoughts");
    this.summary = element("summary", "", "Thinking");
    this.thoughtsBody = element("div", "body");
    this.thoughts.append(this.summary, this.thoughtsBody);
    this.thoughts.hidden = true;
    this.text = element("div", "text caret");
    this.meta = element("div", "meta", "waiting");
    this.turn.append(this.thoughts, this.text, this.meta);
    $("talk").append(this.turn);
  }

  add(delta) {
    const isFirst = this.firstAt === null && (delta.content || delta.reasoning_content);
    if (isFirst) this.firstAt = performance.now();
    this.reasoning += delta.reasoning_content ?? "";
    if (delta.content && !this.content && this.reasoning) this.thoughtS = (performance.now() - this.began) / 1000;
    this.content += delta.content ?? "";
    this.numPieces = (this.numPieces ?? 0) + 1;
    this.later();
  }

  later() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const talk = $("talk");
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
    this.thoughts.hidden = !this.reasoning;
    if (this.reasoning) {
      this.thoughtsBody.textContent = this.reasoning;
      this.summary.textContent = this.thoughtS ? `Thought for ${this.thoughtS.toFixed(1)} s` : "Thinking";
    }
    this.text.replaceChildren(markdown(this.content));
    if (this.text.classList.contains("caret")) this.meta.textContent = this.progress();
    if (isAtEnd) talk.scrollTop = talk.scrollHeight;
  }

  progress() {
    if (this.firstAt === null) return "waiting";
    const seconds = (performance.now() - this.firstAt) / 1000;
    return seconds > 0.2 ? `${(this.numPieces / seconds).toFixed(1)} tok/s` : "";
  }

  end(note) {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.text.classList.remove("caret");
    this.draw();
    this.meta.replaceChildren();
    if (this.usage && this.firstAt !== null) {
      const { completion_tokens: made, prompt_tokens: asked, prompt_tokens_details: details } = this.usage;
      const seconds = (performance.now() - this.firstAt) / 1000;
      const speed = made > 1 ? `${((made - 1) / seconds).toFixed(1)} tok/s` : "";
      const cached = details?.cached_tokens ? `, ${details.cached_tokens} cached` : "";
      const parts = [`${made} tokens`, speed, `first after ${((this.firstAt - this.began) / 1000).toFixed(2)} s`];
      this.meta.append(...[...parts, `prompt ${asked}${cached}`].filter(Boolean).map((part) => element("span", "", part)));
    }
    if (note) this.meta.append(element("span", "", note));
    document.querySelectorAll(".regenerate").forEach((old) => old.remove());
    if (this.content) this.meta.append(button("Copy", () => navigator.clipboard.writeText(this.content)));
    const again = button("Regenerate", regenerate);
    again.className = "regenerate";
    this.meta.append(again);
    $("talk").scrollTop = $("talk").scrollHeight;
  }

  fail(message) {
    this.end();
    this.turn.insertBefore(element("p", "failure", message), this.meta);
    if (/API key/.test(message)) {
      document.querySelector(".settings").open = true;
      $("key").focus();
    }
  }
}

function body() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const system = $("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat.messages],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    chat_template_kwargs: { enable_thinking: $("think").checked },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const text = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (text === "[DONE]") return;
      if (text) yield JSON.parse(text);
    }
  }
}

async function answer() {
  const view = new AnswerView();
  $("talk").scrollTop = $("talk").scrollHeight;
  chat.controller = new AbortController();
  setBusy(true);
  let note = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body()), signal: chat.controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `HTTP ${response.status}`);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) view.usage = event.usage;
      const choice = event.choices[0];
      if (choice && (choice.delta.content || choice.delta.reasoning_content)) view.add(choice.delta);
      if (choice?.finish_reason === "length") note = "cut at the token limit";
    }
    view.end(note);
  } catch (error) {
    if (error.name === "AbortError") view.end("stopped");
    else view.fail(error.message);
  }
  const said = { role: "assistant", content: view.content };
  if (view.reasoning) said.reasoning_content = view.reasoning;
  chat.messages.push(said);
  chat.controller = null;
  setBusy(false);
}

function regenerate() {
  if (chat.controller || chat.messages.at(-1)?.role !== "assistant") return;
  chat.messages.pop();
  $("talk").lastElementChild.remove();
  answer();
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("talk").setAttribute("aria-busy", isBusy);
}

function ask(text) {
  if (!text.trim() || chat.controller) return;
  $("hello").hidden = true;
  chat.messages.push({ role: "user", content: text });
  showUser(text);
  $("question").value = "";
  fitQuestion();
  answer();
}

function fitQuestion() {
  $("question").style.height = "auto";
  $("question").style.height = `${$("question").scrollHeight}px`;
}

function freshChat() {
  chat.controller?.abort();
  chat.messages = [];
  document.querySelectorAll(".turn").forEach((turn) => turn.remove());
  $("hello").hidden = false;
  $("question").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask($("question").value);
});
$("question").addEventListener("input", fitQuestion);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask($("question").value);
  }
});
$("stop").addEventListener("click", () => chat.controller?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const sheet = document.querySelector(".settings");
  if (sheet.open) sheet.open = false;
  else chat.controller?.abort();
});
$("fresh").addEventListener("click", freshChat);
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => sessionStorage.setItem("key", $("key").value));
for (const text of STARTERS) $("starters").append(button(text, () => ask(text)));

// ---- the live view

const live = { rates: [], experts: null, cell: null };

// A colour of the style sheet as the canvas can read it: for the scheme that holds now.
function css(name) {
  const probe = $("probe");
  probe.style.color = `var(${name}, var(--disk))`;
  return getComputedStyle(probe).color;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) {
    count /= 1024;
    at++;
  }
  return `${count >= 100 || at === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[at]}`;
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

function tierColour(name) {
  return css(`--${name.replaceAll(" ", "-")}`);
}

function showStatus(status) {
  const { requests, speed, cache, tiers, model } = status;
  $("model").textContent = model.name;
  $("about").textContent = `${model.name}: ${model.layers} layers, ${model.experts} experts in each, ${model.experts_per_tok} of them for a token`;
  const isBusy = requests.running + requests.queued > 0;
  $("state").className = `state ${isBusy ? "busy" : "ready"}`;
  $("state").textContent = isBusy ? "working" : "ready";
  $("speed").textContent = speed.decode_tok_s.toFixed(speed.decode_tok_s < 100 ? 1 : 0);
  $("running").textContent = requests.running;
  $("running-of").textContent = `of ${requests.max_running}`;
  $("queued").textContent = requests.queued;
  $("queued-of").textContent = `of ${requests.max_queued}`;
  $("first").textContent = seconds(speed.median_first_token_s);
  live.rates.push(speed.decode_tok_s);
  if (live.rates.length > 120) live.rates.shift();
  drawSpark();
  const rows = tiers.map((tier) => ({
    name: tier.name, colour: tierColour(tier.name), share: tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0,
    text: `${tier.num_experts} experts, ${bytes(tier.used_bytes)}${tier.name === "disk" ? "" : ` of ${bytes(tier.capacity_bytes)}`}`,
  })).filter((row, i) => tiers[i].num_experts || tiers[i].capacity_bytes);
  const taken = cache.taken_pages / cache.pages;
  rows.push({
    name: "KV cache", colour: css("--accent"), share: taken,
    text: `${cache.taken_pages} of ${cache.pages} pages, ${bytes(cache.bytes)}, ${cache.remembered_pages} remembered`,
  });
  $("bars").replaceChildren(...rows.map((row) => barRow(row.name, row.text, [[row.share, row.colour]])));
  const hits = Object.entries(status.expert_uses).map(([phase, uses]) => {
    const all = uses.locked + uses.ram + uses.prefetched + uses.late + uses.missed;
    const parts = ["locked", "ram"].map((name) => [all ? uses[name] / all : 0, tierColour(name)]);
    parts.push([all ? (uses.prefetched + uses.late + uses.missed) / all : 0, css("--disk")]);
    return barRow(phase, all ? `${(uses.hit_rate * 100).toFixed(1)} % of ${all.toLocaleString("en")} uses` : "no uses yet", parts);
  });
  $("hits").replaceChildren(...hits);
  const { tokens, kernels } = status;
  const cached = tokens.prompt ? ` (${Math.round((100 * tokens.cached) / tokens.prompt)} % cached)` : "";
  $("foot").replaceChildren(
    `${tokens.prompt.toLocaleString("en")} prompt tokens${cached}, ${tokens.completion.toLocaleString("en")} generated · ` +
    `${kernels.instruction_set}, ${kernels.threads} threads · peak ${bytes(status.peak_rss_bytes)} · glm-gpu ${status.version} · `,
    Object.assign(element("a", "", "interface"), { href: "/docs" }),
  );
}

function barRow(name, text, parts) {
  const row = element("div", "bar-row");
  const top = element("div", "top");
  top.append(element("span", "", name), element("span", "", text));
  const track = element("div", "track");
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `${name}: ${text}`);
  for (const [share, colour] of parts) {
    const part = element("i");
    part.style.width = `${Math.min(100, share * 100)}%`;
    part.style.background = colour;
    track.append(part);
  }
  row.append(top, track);
  return row;
}

function drawSpark() {
  const top = Math.max(1, ...live.rates);
  const points = live.rates.map((rate, i) => `${120 - live.rates.length + i + 1},${(27 - (rate / top) * 25).toFixed(2)}`);
  const line = points.length ? `M${points.join("L")}` : "";
  document.querySelector(".spark .line").setAttribute("d", line);
  document.querySelector(".spark .area").setAttribute("d", line && `${line}L120,28L${121 - live.rates.length},28Z`);
}

function mapSizes() {
  const { layers, experts } = live.experts;
  const width = $("map").clientWidth;
  const left = 24;
  const cell = (width - left) / experts;
  const height = Math.max(4, Math.min(22, 130 / layers.length));
  return { width, left, cell, height, gap: cell >= 4 ? 1 : 0, rowGap: height >= 5 ? 1 : 0 };
}

function drawMap() {
  if (!live.experts || !$("map").clientWidth) return;
  const { layers, experts, names } = live.experts;
  const { width, left, cell, height, gap, rowGap } = mapSizes();
  const canvas = $("map");
  const ratio = window.devicePixelRatio || 1;
  const total = layers.length * height + 8;
  canvas.style.height = `${total}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(total * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const colours = names.map(tierColour);
  const labelled = Math.max(1, Math.ceil(11 / height));
  pen.font = "9px ui-monospace, monospace";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  layers.forEach((row, y) => {
    const top = 4 + y * height;
    if (y % labelled === 0) {
      pen.globalAlpha = 1;
      pen.fillStyle = css("--muted");
      pen.fillText(row.layer, left - 6, top + height / 2);
    }
    for (let x = 0; x < experts; x++) {
      pen.fillStyle = colours[row.tiers[x]];
      pen.globalAlpha = 0.16 + 0.84 * (row.heat[x] / 9);
      pen.fillRect(left + x * cell, top, cell - gap, height - rowGap);
    }
  });
  pen.globalAlpha = 1;
  if (live.cell) {
    pen.strokeStyle = css("--text");
    pen.lineWidth = 1.5;
    pen.strokeRect(left + live.cell.x * cell - 0.75, 4 + live.cell.y * height - 0.75, cell - gap + 1.5, height - rowGap + 1.5);
  }
}

function showExperts(found) {
  live.experts = found;
  $("map-size").textContent = `${found.layers.length} layers × ${found.experts}`;
  const counts = found.names.map(() => 0);
  for (const row of found.layers) for (const digit of row.tiers) counts[digit]++;
  const seen = found.names.map((name, i) => [name, counts[i]]).filter(([, count]) => count);
  $("legend").replaceChildren(...seen.map(([name, count]) => {
    const item = element("li");
    const swatch = element("i");
    swatch.style.background = tierColour(name);
    item.append(swatch, `${name} `, element("b", "", count.toLocaleString("en")));
    return item;
  }));
  $("map").setAttribute("aria-label", `Map of ${found.layers.length} layers and ${found.experts} experts: ` +
    seen.map(([name, count]) => `${count} ${name}`).join(", "));
  if (live.cell) describeCell();
  drawMap();
}

function pick(x, y) {
  const { layers, experts } = live.experts;
  live.cell = { x: Math.max(0, Math.min(experts - 1, x)), y: Math.max(0, Math.min(layers.length - 1, y)) };
  describeCell();
  drawMap();
}

function describeCell() {
  const { layers, names } = live.experts;
  const row = layers[live.cell.y];
  const heat = Number(row.heat[live.cell.x]);
  $("cell").textContent = `Layer ${row.layer}, expert ${live.cell.x}: in ${names[row.tiers[live.cell.x]]}, ` +
    (heat ? `heat ${heat} of 9` : "never used");
}

$("map").addEventListener("pointermove", (event) => {
  if (!live.experts) return;
  const { left, cell, height } = mapSizes();
  const box = $("map").getBoundingClientRect();
  pick(Math.floor((event.clientX - box.left - left) / cell), Math.floor((event.clientY - box.top - 4) / height));
});
$("map").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!step || !live.experts) return;
  event.preventDefault();
  const from = live.cell ?? { x: -1, y: 0 };
  pick(from.x + step[0], from.y + step[1]);
});
$("toggle-live").addEventListener("click", () => {
  const isHidden = document.querySelector("main").classList.toggle("alone");
  $("toggle-live").setAttribute("aria-expanded", !isHidden);
  drawMap();
});
if (window.matchMedia("(max-width: 980px)").matches) $("toggle-live").click();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
new ResizeObserver(drawMap).observe($("live"));

async function poll() {
  if (!document.hidden) {
    try {
      const paths = ["/status", "/experts"];
      const [status, experts] = await Promise.all(paths.map((path) => fetch(path, { headers: headers() })));
      if (status.status === 401) {
        $("state").className = "state gone";
        $("state").textContent = "asks for an API key (Settings)";
      } else {
        if (!status.ok || !experts.ok) throw new Error(`HTTP ${status.status}`);
        showStatus(await status.json());
        showExperts(await experts.json());
      }
    } catch {
      $("state").className = "state gone";
      $("state").textContent = "server not reachable";
    }
  }
  setTimeout(poll, chat.controller ? 700 : 1500);
}
poll();
