// Shows /openapi.json: each path with the fields of its body, and a command to try it.

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Who art thou?" }], max_tokens: 32 },
  "/v1/completions": { prompt: "And it came to pass", max_tokens: 32 },
  "/v1/responses": { input: "Who art thou?", max_output_tokens: 32 },
  "/v1/messages": { messages: [{ role: "user", content: "Who art thou?" }], max_tokens: 32 },
  "/v1/messages/count_tokens": { messages: [{ role: "user", content: "Who art thou?" }] },
  "/tokenize": { prompt: "And it came to pass" },
  "/detokenize": { tokens: [5, 6, 7] },
};

function element(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

function named(reference) {
  return reference.split("/").pop();
}

// A schema as a short type: "text | list of integer | null", with its bounds.
function typeOf(schema) {
  if (schema.$ref) return named(schema.$ref);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map(typeOf))].join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  const bounds = [
    schema.minimum !== undefined && `≥ ${schema.minimum}`, schema.exclusiveMinimum !== undefined && `> ${schema.exclusiveMinimum}`,
    schema.maximum !== undefined && `≤ ${schema.maximum}`,
  ].filter(Boolean).join(", ");
  const name = { string: "text" }[schema.type] ?? schema.type ?? "anything";
  return bounds ? `${name} ${bounds}` : name;
}

function fieldTable(schema) {
  const table = element("table", "fields");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const isRequired = (schema.required ?? []).includes(name);
    const fallback = field.default !== undefined && field.default !== null ? `default ${JSON.stringify(field.default)}` : "";
    table.append(element("tr", "",
      element("th", "", name),
      element("td", "type", typeOf(field)),
      element("td", "", [isRequired ? "required" : fallback, field.description ?? ""].filter(Boolean).join("; ")),
    ));
  }
  return table;
}

function command(method, path, body) {
  const url = `${location.origin}${path}`;
  if (method === "get") return `curl ${url}`;
  return `curl ${url} -H 'Content-Type: application/json' -d '${JSON.stringify(body)}'`;
}

function operation(document_, path, method, facts) {
  const entry = element("details", "operation");
  const summary = element("summary", "", element("b", method, method.toUpperCase()), element("code", "", path));
  summary.append(element("span", "aside", facts.description ?? facts.summary ?? ""));
  entry.append(summary);
  for (const parameter of facts.parameters ?? []) {
    entry.append(element("p", "", `${parameter.name} (${parameter.in}): ${typeOf(parameter.schema)}`));
  }
  const reference = facts.requestBody?.content["application/json"]?.schema.$ref;
  if (reference) {
    const schema = document_.components.schemas[named(reference)];
    entry.append(fieldTable(schema));
    const nested = new Set(JSON.stringify(schema).match(/#\/components\/schemas\/\w+/g) ?? []);
    for (const inner of nested) {
      const found = document_.components.schemas[named(inner)];
      entry.append(element("h3", "", named(inner)), element("p", "", found.description ?? ""), fieldTable(found));
    }
  }
  if (!path.includes("{")) entry.append(element("pre", "", command(method, path, EXAMPLES[path])));
  return entry;
}

async function show() {
  const key = sessionStorage.getItem("key");
  const response = await fetch("/openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (!response.ok) throw new Error(response.status === 401 ? "the server asks for an API key: give it on the first page" : `HTTP ${response.status}`);
  const found = await response.json();
  const groups = new Map();
  for (const [path, methods] of Object.entries(found.paths)) {
    for (const [method, facts] of Object.entries(methods)) {
      const group = facts.tags?.[0] ?? "other";
      if (!groups.has(group)) groups.set(group, element("section", "", element("h2", "", group)));
      groups.get(group).append(operation(found, path, method, facts));
    }
  }
  document.getElementById("paths").replaceChildren(...groups.values());
}

show().catch((error) => {
  document.getElementById("note").textContent = `The description cannot be shown: ${error.message}`;
});
