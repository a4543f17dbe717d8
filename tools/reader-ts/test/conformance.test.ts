/** Every case of the conformance suite whose profile is claimed, through the adapter. */
import assert from "node:assert/strict";
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { gunzipSync } from "node:zlib";
import { Adapter } from "./adapterProcess.js";

const CASES = process.env["DELTAFORMAT_CASES"] ?? fileURLToPath(new URL("../../../../conformance/cases", import.meta.url));

interface Case {
  id: string;
  level: string;
  profile: string;
  op: string;
  args: Record<string, unknown>;
  features?: string[];
  store?: string;
  gzip?: string[];
  place?: Record<string, string>;
}

function findCases(directory: string): string[] {
  return readdirSync(directory, { withFileTypes: true }).filter((e) => e.isDirectory()).flatMap((e) => {
    const path = join(directory, e.name);
    return existsSync(join(path, "case.json")) ? [path] : findCases(path);
  });
}

const json = <T>(path: string): T => JSON.parse(readFileSync(path, "utf8")) as T;

let adapter: Adapter;
let features: string[];
const scratch = mkdtempSync(join(tmpdir(), "deltaformat-cases-"));

before(async () => {
  adapter = new Adapter();
  const hello = await adapter.ask({ op: "hello", protocol: 1 });
  features = hello["features"] as string[];
});

after(async () => {
  await adapter.close();
  rmSync(scratch, { recursive: true });
});

/** A copy of the case's store, with what is gzipped unpacked; an empty place where there is none. */
function prepare(path: string, spec: Case, name: string): string {
  const store = join(scratch, name);
  const owner = spec.store === undefined ? path : join(CASES, spec.store);
  const source = join(owner, "store");
  if (existsSync(source)) cpSync(source, store, { recursive: true });
  for (const key of json<Case>(join(owner, "case.json")).gzip ?? []) {
    writeFileSync(join(store, key), gunzipSync(readFileSync(join(store, `${key}.gz`))));
    rmSync(join(store, `${key}.gz`));
  }
  return store;
}

/** Puts external files where the case's URLs say; returns how to take them away again. */
function place(path: string, spec: Case): () => void {
  const placed = Object.entries(spec.place ?? {}).map(([to, from]) => {
    mkdirSync(dirname(to), { recursive: true });
    cpSync(join(path, from), to);
    return to;
  });
  return () => placed.forEach((to) => {
    rmSync(to);
    try {
      for (let directory = dirname(to); directory !== "/tmp"; directory = dirname(directory)) rmdirSync(directory);
    } catch {
      // Not empty: another file of the case lies there.
    }
  });
}

findCases(CASES).forEach((path, i) => {
  const spec = json<Case>(join(path, "case.json"));
  const id = relative(CASES, path);
  if (!spec.profile.startsWith("reader")) return;
  test(`case ${id}`, async (t) => {
    const lacking = (spec.features ?? []).filter((feature) => !features.includes(feature));
    if (lacking.length > 0) return t.skip(`needs ${lacking.join(", ")}`);
    const store = prepare(path, spec, `case-${i}`);
    const remove = place(path, spec);
    try {
      const reply = await adapter.ask({ op: spec.op, store, ...spec.args });
      const expected = json<{ ok?: object; error?: Record<string, unknown> }>(join(path, "expect.json"));
      try {
        if (expected.ok !== undefined) compareOk(reply, expected.ok);
        else compareError(reply, expected.error!);
      } catch (e) {
        if (spec.level === "must") throw e;
        t.diagnostic(`should: ${String(e)}`);
      }
    } finally {
      remove();
      rmSync(store, { recursive: true, force: true });
    }
  });
});

function compareOk(reply: Record<string, unknown>, ok: object): void {
  assert.equal(reply["result"], "ok", JSON.stringify(reply));
  for (const [name, value] of Object.entries(ok)) assert.deepEqual(reply[name], value, name);
}

function compareError(reply: Record<string, unknown>, error: Record<string, unknown>): void {
  assert.equal(reply["result"], "error", JSON.stringify(reply).slice(0, 500));
  assert.equal(reply["class"], error["class"], JSON.stringify(reply).slice(0, 500));
  if (error["held"] !== undefined) assert.deepEqual(reply["held"], error["held"]);
}
