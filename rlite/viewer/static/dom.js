// Elements from plain values. Text only ever becomes a text node, so nothing that a model wrote is markup.

const SVG = "http://www.w3.org/2000/svg";
const LONG = 20000; // characters of a text that are shown at first

export function h(tag, options = {}, ...children) {
  return filled(document.createElement(tag), options, children);
}

export function svg(tag, options = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), options, children);
}

function filled(element, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "style") for (const [key, set] of Object.entries(value)) element.style.setProperty(key, set);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Replaces the children of an element. Those that leave the page are discarded.
export function fill(element, ...children) {
  const next = children.flat(Infinity).filter(Boolean);
  for (const ending of element.querySelectorAll("[data-ends]")) if (!next.some((child) => child.contains?.(ending))) discard(ending);
  element.replaceChildren(...next);
  return element;
}

// Makes the children of an element like others, which have no listeners. Elements stay at their places, so that the
// focus does, and a status is announced only when its text changes.
export function update(element, ...children) {
  const next = [...h("div", {}, children.flat(Infinity).filter(Boolean)).childNodes]; // texts become nodes
  const before = [...element.childNodes];
  for (const gone of before.slice(next.length)) gone.remove();
  next.forEach((child, index) => {
    const own = before[index];
    if (!own) element.append(child);
    else if (own.nodeName !== child.nodeName) own.replaceWith(child);
    else if (!own.isEqualNode(child)) become(own, child);
  });
  return element;
}

function become(own, other) {
  if (own.nodeType === Node.TEXT_NODE) {
    own.data = other.data;
    return;
  }
  for (const name of own.getAttributeNames()) if (!other.hasAttribute(name)) own.removeAttribute(name);
  for (const name of other.getAttributeNames()) {
    if (own.getAttribute(name) === other.getAttribute(name)) continue;
    if (name === "style") own.style.cssText = other.style.cssText; // the policy allows no other way
    else own.setAttribute(name, other.getAttribute(name));
  }
  update(own, ...other.childNodes);
}

// Puts children into an element, in order. Those that are at their place already are not touched.
export function arrange(element, children) {
  const next = new Set(children);
  for (const old of [...element.children]) {
    if (next.has(old)) continue;
    discard(old);
    old.remove();
  }
  children.forEach((child, index) => element.children[index] === child || element.insertBefore(child, element.children[index] ?? null));
}

const endings = new WeakMap();

// Calls `act` when an element leaves the page for good, such as an observer's disconnect.
export function whenDiscarded(element, act) {
  endings.set(element, act);
  element.dataset.ends = "";
  return element;
}

// Ends what the elements of a part of the page hold.
export function discard(root) {
  for (const element of [root, ...root.querySelectorAll("[data-ends]")]) {
    endings.get(element)?.();
    endings.delete(element);
  }
}

// A text of the model. A long one is cut, with a button for the rest.
export function longText(text, limit = LONG) {
  if (text.length <= limit) return [text];
  const rest = h("button", { type: "button", class: "more" }, `Show all ${text.length.toLocaleString("en")} characters`);
  rest.addEventListener("click", () => rest.replaceWith(text.slice(limit)));
  return [text.slice(0, limit), rest];
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", {}, title), ...children);
}

export function empty(title, ...words) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, ...words));
}

// A part that scrolls, which the keyboard reaches.
export function scroller(label, options = {}, ...children) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label, ...options }, ...children);
}

export function select(label, choices, chosen, act) {
  const options = choices.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text));
  return h("label", {}, label, h("select", { "aria-label": label, on: { change: (event) => act(event.target.value) } }, options));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en");
  const told = Number(value.toPrecision(digits));
  return size < 0.001 && size > 0 ? told.toExponential() : String(told);
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

// A large number in a few letters, such as 1.2M.
export function compact(value) {
  return value === null || value === undefined ? "–" : Math.abs(value) >= 10000 ? COMPACT.format(value) : number(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1) return `${(1000 * value).toPrecision(3)} ms`;
  if (value < 120) return `${value.toPrecision(3)} s`;
  return value < 7200 ? `${(value / 60).toFixed(1)} min` : value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

export function ago(unix) {
  const passed = Math.max(0, Date.now() / 1000 - unix);
  const [size, unit] = passed < 90 ? [1, "s"] : passed < 5400 ? [60, "min"] : passed < 129600 ? [3600, "h"] : [86400, "days"];
  return `${Math.round(passed / size)} ${unit} ago`;
}

const NAMES = { answer: "judged answer" };

// The name of a status or a column.
export function words(name) {
  return NAMES[name] ?? String(name).replaceAll("_", " ");
}

// The newest finished step, else the newest step: the end of a run records what was under way in the step after its last.
export function newest(steps, { last_step: last }) {
  return steps.findLast((step) => step <= last) ?? steps.at(-1);
}

// An entry of a legend.
export function key(color, text) {
  return h("span", { class: "key" }, h("i", { class: "swatch", style: { background: color } }), text);
}

// The mean of the values that are numbers; null if there are none.
export function mean(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

export function groupedBy(rows, keyOf) {
  const groups = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return groups;
}

// Rows of an answer, whose columns are lists.
export function rowsOf(columns) {
  const names = Object.keys(columns);
  const length = names.length ? columns[names[0]].length : 0;
  return Array.from({ length }, (_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
}
