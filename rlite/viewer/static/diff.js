// The difference of two texts, word by word (Myers, 1986).

import { h } from "viewer/dom";

const MAX_EDITS = 3000; // beyond, texts have little in common, and the middle is shown as replaced

// Parts {text, kind} of two texts: same, gone (of the first), new (of the second). `isRough` is true if the texts differ so
// much that all words between their beginning and their end count as replaced.
export function difference(first, second) {
  const [a, b] = [words(first), words(second)];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < Math.min(a.length, b.length) - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const [x, y] = [a.slice(head, a.length - tail), b.slice(head, b.length - tail)];
  const middle = edits(x, y);
  const of = (kind, parts) => parts.map((text) => ({ text, kind }));
  const between = middle ?? [...of("gone", x), ...of("new", y)];
  return { parts: joined([...of("same", a.slice(0, head)), ...between, ...of("same", a.slice(a.length - tail))]), isRough: !middle };
}

export function side(parts, kind) {
  return parts.filter((part) => part.kind === "same" || part.kind === kind).map((part) => (part.kind === "same" ? part.text : h(kind === "gone" ? "del" : "ins", {}, part.text)));
}

function words(text) {
  return text.match(/\w+\s*|[^\s\w]\s*|\s+/gu) ?? [];
}

// Parts of two lists of words; null if there are too many edits.
function edits(a, b) {
  const trace = path(a, b);
  if (!trace) return null;
  const parts = [];
  let [x, y] = [a.length, b.length];
  for (let depth = trace.length - 1; depth >= 0; depth -= 1) {
    const reach = (k) => trace[depth][k + depth + 1];
    const isDown = comesFromAbove(reach, x - y, depth);
    const before = x - y + (isDown ? 1 : -1);
    const [fromX, fromY] = depth ? [reach(before), reach(before) - before] : [0, 0];
    for (; x > fromX && y > fromY; x -= 1, y -= 1) parts.push({ text: a[x - 1], kind: "same" });
    if (depth) parts.push(isDown ? { text: b[fromY], kind: "new" } : { text: a[fromX], kind: "gone" });
    [x, y] = [fromX, fromY];
  }
  return parts.reverse();
}

// The furthest x on the diagonals -depth-1 to depth+1, before each number of edits; null if there are too many edits.
function path(a, b) {
  const most = Math.min(a.length + b.length, MAX_EDITS);
  const middle = most + 1;
  const furthest = new Int32Array(2 * middle + 1);
  const reach = (k) => furthest[k + middle];
  const trace = [];
  for (let depth = 0; depth <= most; depth += 1) {
    trace.push(furthest.slice(middle - depth - 1, middle + depth + 2));
    for (let k = -depth; k <= depth; k += 2) {
      let x = comesFromAbove(reach, k, depth) ? reach(k + 1) : reach(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest[k + middle] = x;
      if (x >= a.length && x - k >= b.length) return trace;
    }
  }
  return null;
}

function comesFromAbove(reach, k, depth) {
  return k === -depth || (k !== depth && reach(k - 1) < reach(k + 1));
}

function joined(parts) {
  const made = [];
  for (const { text, kind } of parts) {
    if (made.at(-1)?.kind === kind) made.at(-1).text += text;
    else made.push({ text, kind });
  }
  return made;
}
