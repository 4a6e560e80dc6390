// Markdown to elements, never through HTML text: nothing a model writes can become markup.

const BLOCK = /^(#{1,4} |\s*[-*+] |\s*\d+[.)] |> ?|```|~~~|(-{3,}|\*{3,}|_{3,})\s*$|\|.*\|\s*$)/;

export function markdown(text) {
  const out = document.createDocumentFragment();
  readBlocks(text.replace(/\r\n?/g, "\n").split("\n"), out, 0);
  return out;
}

function readBlocks(lines, out, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      const body = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) body.push(lines[at]);
      at++;
      out.append(codeBlock(body.join("\n"), fence[2]));
    } else if (/^#{1,4} /.test(line)) {
      const [, marks, title] = line.match(/^(#+) (.*)/);
      out.append(inline(title.replace(/\s#+\s*$/, ""), make(`h${marks.length}`)));
      at++;
    } else if (/^(-{3,}|\*{3,}|_{3,})\s*$/.test(line)) {
      out.append(make("hr"));
      at++;
    } else if (/^> ?/.test(line) && depth < 6) {
      const body = [];
      for (; at < lines.length && /^> ?/.test(lines[at]); at++) body.push(lines[at].replace(/^> ?/, ""));
      const quote = make("blockquote");
      readBlocks(body, quote, depth + 1);
      out.append(quote);
    } else if (/^\s*([-*+]|\d+[.)]) /.test(line) && depth < 6) {
      at = readList(lines, at, out, depth);
    } else if (/^\|.*\|\s*$/.test(line) && /^\|[\s:|-]+\|\s*$/.test(lines[at + 1] ?? "")) {
      at = readTable(lines, at, out);
    } else {
      const body = [line];
      for (at++; at < lines.length && lines[at].trim() && !BLOCK.test(lines[at]); at++) body.push(lines[at]);
      out.append(inline(body.join("\n"), make("p")));
    }
  }
}

function readList(lines, at, out, depth) {
  const marker = /^(\s*)([-*+]|\d+[.)]) (.*)$/;
  const [, indent, first] = lines[at].match(marker);
  const isOrdered = /\d/.test(first);
  const list = make(isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = parseInt(first, 10);
  while (at < lines.length) {
    const found = lines[at].match(marker);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const body = [found[3]];
    const inner = indent.length + found[2].length + 1;
    for (at++; at < lines.length; at++) {
      const isInside = lines[at].match(/^\s*/)[0].length >= Math.min(inner, indent.length + 2);
      if (lines[at].trim() ? !isInside : !/^\s{2,}\S/.test(lines[at + 1] ?? "")) break;
      body.push(lines[at].slice(Math.min(inner, lines[at].match(/^\s*/)[0].length)));
    }
    const item = make("li");
    if (body.length === 1) inline(body[0], item);
    else readItem(body, item, depth);
    list.append(item);
  }
  out.append(list);
  return at;
}

function readItem(body, item, depth) {
  const rest = body.findIndex((line, i) => i > 0 && (BLOCK.test(line) || !line.trim()));
  const lead = rest < 0 ? body : body.slice(0, rest);
  inline(lead.join("\n"), item);
  if (rest >= 0) readBlocks(body.slice(rest), item, depth + 1);
}

function readTable(lines, at, out) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const table = make("table");
  const head = make("tr");
  for (const cell of cells(lines[at])) head.append(inline(cell, make("th")));
  table.append(head);
  for (at += 2; at < lines.length && /^\|.*\|\s*$/.test(lines[at]); at++) {
    const row = make("tr");
    for (const cell of cells(lines[at])) row.append(inline(cell, make("td")));
    table.append(row);
  }
  out.append(table);
  return at;
}

const SPANS = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=\S)([^*\n]*?\S)\*|(?<![\w])_(?=\S)([^_\n]*?\S)_(?![\w])|~~(?=\S)([\s\S]*?\S)~~|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+\-.!~|>])/g;

function inline(text, into) {
  let at = 0;
  for (const match of text.matchAll(SPANS)) {
    into.append(text.slice(at, match.index));
    at = match.index + match[0].length;
    const [, , code, strong, em, em2, struck, label, target, bare, escaped] = match;
    if (code !== undefined) into.append(make("code", code.trim()));
    else if (strong !== undefined) into.append(inline(strong, make("strong")));
    else if ((em ?? em2) !== undefined) into.append(inline(em ?? em2, make("em")));
    else if (struck !== undefined) into.append(inline(struck, make("del")));
    else if (escaped !== undefined) into.append(escaped);
    else {
      const link = make("a", label ?? bare);
      link.href = target ?? bare;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      into.append(link);
    }
  }
  into.append(text.slice(at));
  return into;
}

function codeBlock(text, language) {
  const block = make("div");
  block.className = "block";
  const bar = make("div");
  bar.className = "bar";
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1200);
  });
  bar.append(make("span", language || "text"), copy);
  const pre = make("pre");
  pre.append(make("code", text));
  pre.tabIndex = 0;
  block.append(bar, pre);
  return block;
}

function make(name, text) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  return element;
}
