"use strict";
// What is shown was chosen by clients and brokers in part: it becomes text (textContent), never markup.
const KEY = "pulsar-trio-proxy admin token", SILENCE_MS = 15000, POINTS = 150, WIDTH = 600, HEIGHT = 90;
const byId = (id) => document.getElementById(id);
const history = [];
let token = "", reading = null;
try { token = sessionStorage.getItem(KEY) || ""; } catch { /* storage is off: the token lives in memory alone */ }

const setText = (node, text) => { if (node.textContent !== String(text)) node.textContent = text; };

function setState(id, text, mood) {
  setText(byId(id), text);
  byId(id).className = `state ${mood}`;
}

function make(parent, tag, className = "") {
  const node = parent.appendChild(document.createElement(tag));
  if (className) node.className = className;
  return node;
}

function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds)), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24;
  const m = Math.floor(s / 60) % 60;
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

const count = (number) => Number(number).toLocaleString("en");
const rate = (data, size) => (data.has_rates ? `${bytes(size)}/s` : "…");
const sum = (rows, key) => rows.reduce((total, row) => total + (row[key] || 0), 0);

// Columns: heading, class of the cells, text of a row, mood of a row (a class). Nodes are kept: a selection survives.
function fill(id, caption, columns, rows) {
  const table = byId(id);
  if (!table.tHead) {
    make(table, "caption");
    const head = make(make(table, "thead"), "tr");
    for (const [heading, kind] of columns) {
      const cell = make(head, "th", kind);
      cell.scope = "col";
      cell.textContent = heading;
    }
    make(table, "tbody");
  }
  setText(table.caption, caption);
  table.tHead.hidden = rows.length === 0;
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  while (body.rows.length < rows.length) {
    const line = make(body, "tr");
    columns.forEach((_column, index) => { make(line, index ? "td" : "th").scope = "row"; });
  }
  rows.forEach((row, number) => columns.forEach(([, kind, text, mood], index) => {
    const cell = body.rows[number].cells[index];
    setText(cell, text(row));
    cell.className = `${kind} ${mood ? mood(row) : ""}`;
  }));
}

function tiles(list) {
  const box = byId("tiles");
  while (box.children.length < list.length) { const tile = make(box, "div"); make(tile, "dt"); make(tile, "dd"); }
  list.forEach(([name, value, mood], index) => {
    const [term, fact] = box.children[index].children;
    setText(term, name);
    setText(fact, value);
    fact.className = mood || "";
  });
}

function chart(toBroker, toClient) {
  history.push([toBroker, toClient]);
  if (history.length > POINTS) history.shift();
  const peak = Math.max(1, ...history.flat());
  byId("chart").querySelectorAll("polyline").forEach((line, way) => {
    const at = (one, index) => `${(index * WIDTH) / Math.max(1, history.length - 1)},`
      + `${HEIGHT - 2 - (one[way] / peak) * (HEIGHT - 6)}`;
    line.setAttribute("points", history.map(at).join(" "));
  });
  setText(byId("peak"), `highest ${bytes(peak)}/s`);
}

function show(data) {
  const running = data.workers.filter((one) => one.state === "running").length;
  const soon = data.certificates.filter((one) => one.within_30_days), ended = soon.some((one) => one.has_ended);
  const toBroker = sum(data.principals, "to_broker"), toClient = sum(data.principals, "to_client");
  const busiest = Math.max(1, ...data.principals.map((one) => one.to_broker + one.to_client));
  document.title = `${data.cluster} – pulsar-trio-proxy`;
  setText(byId("cluster"), data.cluster);
  setText(byId("about"), `pulsar-trio-proxy ${data.version}, generation ${data.generation}, Python ${data.python}, `
    + `${data.openssl}. ${data.listeners.join(", ")} → ${data.service_url}. `
    + `Authentication ${data.authentication ? "on" : "off"}.`);
  const ready = data.replacing_workers ? "ready, replacing workers" : "ready";
  setState("ready", data.ready ? ready : "not ready", data.ready ? "good" : "bad");
  const notes = [...data.not_ready_because, ...data.notes], list = byId("notes");
  while (list.children.length > notes.length) list.lastChild.remove();
  while (list.children.length < notes.length) make(list, "li");
  notes.forEach((note, index) => setText(list.children[index], note));
  tiles([
    ["Connections", count(sum(data.workers, "connections"))],
    ["To brokers", rate(data, toBroker)],
    ["To clients", rate(data, toClient)],
    ["Workers running", `${running} of ${data.workers.length}`, running < data.workers.length ? "warn" : ""],
    ["Brokers reachable", `${data.brokers_reachable} of ${data.brokers_known}`,
      data.brokers_reachable < data.brokers_known ? "bad" : ""],
    ["Sessions ending within 60 s", count(data.sessions.ending_within_60_s)],
    ["Certificates ending within 30 d", `${soon.length} of ${data.certificates_known}`,
      ended ? "bad" : soon.length ? "warn" : ""],
  ]);
  if (data.has_rates) chart(toBroker, toClient);
  fill("principals", data.principals.length ? "Relays and lookup connections; bytes of relays. The busiest first."
    : "No connections.", [
    ["principal", "", (one) => one.principal],
    ["connec\u00adtions", "number", (one) => count(one.connections)],
    ["to brokers", "number", (one) => rate(data, one.to_broker)],
    ["to clients", "number", (one) => rate(data, one.to_client)],
  ], data.principals);
  data.principals.forEach((one, index) => byId("principals").tBodies[0].rows[index].cells[0].style
    .setProperty("--share", `${Math.round((100 * (one.to_broker + one.to_client)) / busiest)}%`));
  const more = data.brokers_known - data.brokers.length;
  fill("brokers", data.brokers_known ? (more ? `${count(more)} more are not shown.` : "") : "None is known.", [
    ["broker", "", (one) => one.broker],
    ["reached by", "short", (one) => `${one.reachable} of ${one.asked} workers`,
      (one) => (one.reachable === one.asked ? "good" : "bad")],
    ["details", "extra", (one) => one.detail],
  ], data.brokers);
  fill("workers", "", [
    ["worker", "short", (one) => `${one.role}-${one.worker}`],
    ["state", "short", (one) => one.state, (one) => (one.state === "running" ? "good" : "warn")],
    ["connec\u00adtions", "number", (one) => ("connections" in one ? count(one.connections) : "")],
    ["restarts", "number", (one) => count(one.restarts), (one) => (one.restarts ? "warn" : "")],
    ["up", "number extra", (one) => ("uptime_seconds" in one ? duration(one.uptime_seconds) : "")],
    ["pid", "number extra", (one) => one.pid ?? ""],
  ], data.workers);
  fill("sessions", `${count(data.sessions.ending_within_60_s)} end within 60 s, `
    + `${count(data.sessions.expired_and_idle)} expired and idle.`, [
    ["principal", "", (one) => one.principal || "nobody"],
    ["client", "", (one) => one.client],
    ["ends in", "number", (one) => `${Math.round(one.seconds_left)} s`],
  ], data.sessions.soonest);
  fill("certificates", data.certificates.length ? "" : "None is in use.", [
    ["key", "", (one) => one.key],
    ["ends at", "", (one) => `${new Date(one.ends_at_unix_s * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`],
    ["in", "number", (one) => (one.has_ended ? "HAS ENDED" : duration(one.ends_at_unix_s - data.at_unix_s)),
      (one) => (one.has_ended ? "bad" : one.within_30_days ? "warn" : "good")],
  ], data.certificates);
  fill("events", data.events.length ? "" : "None since the supervisor began.", [
    ["time (UTC)", "", (one) => one.at.slice(0, 19).replace("T", " ")],
    ["level", "extra short", (one) => one.level, (one) => ({ error: "bad", critical: "bad", warning: "warn" })[one.level] || ""],
    ["event", "", (one) => (one.details ? `${one.event} (${one.details})` : one.event)],
  ], data.events);
  byId("main").hidden = false;
}

function receive(event) {
  const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
  if (event.startsWith("event: snapshot\n")) {
    show(JSON.parse(data));
    setState("live", "live", "good");
  } else {
    setState("live", data, "bad");
  }
}

async function read() {
  const stop = reading = new AbortController();
  let watchdog = setTimeout(() => stop.abort(), SILENCE_MS), text = "";
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch("/events", { headers, cache: "no-store", signal: stop.signal });
    byId("login").hidden = response.status !== 401;
    if (response.status === 401) {
      byId("main").hidden = true;
      setState("live", token ? "the token is not accepted" : "a token is needed", "warn");
      return false;
    }
    if (!response.ok) throw new Error((await response.text()).slice(0, 100));
    const decoder = new TextDecoder(), body = response.body.getReader();
    for (let part = await body.read(); !part.done; part = await body.read()) {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
      const events = (text + decoder.decode(part.value, { stream: true })).split("\n\n");
      text = events.pop();
      events.forEach(receive);
    }
    setState("live", "reconnecting", "warn");
  } catch (error) {
    setState("live", error.name === "AbortError" ? "paused" : `not connected: ${error.message}`, "warn");
  } finally {
    clearTimeout(watchdog);
    reading = null;
  }
  return true;
}

async function run() {
  while (!document.hidden && !reading && await read()) await new Promise((resolve) => { setTimeout(resolve, 2000); });
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  byId("token").value = "";
  try { sessionStorage.setItem(KEY, token); } catch { /* as above */ }
  run();
});
document.addEventListener("visibilitychange", () => { if (document.hidden) reading?.abort(); else run(); });
run();
