/** The same source in a browser: a bundled page reads the worked store over HTTP. */
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { openStore } from "../src/node.js";
import { sha256 } from "./builder.js";
import { FileServer } from "./server.js";

const WORKED = fileURLToPath(new URL("../../../../conformance/cases/valid/worked-store/store", import.meta.url));
const PAGE = fileURLToPath(new URL("./browserPage.js", import.meta.url));
const TIMEOUT_MS = 60_000;

const FLAGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
];

function browser(): string | undefined {
  return ["chromium", "chromium-browser"].find((name) => spawnSync(name, ["--version"]).status === 0);
}

/** Starts the browser; returns how to end it. */
function start(command: string, profile: string, url: string): () => Promise<void> {
  const child = spawn(command, [...FLAGS, `--user-data-dir=${profile}`, url], { stdio: "ignore" });
  const ended = new Promise<void>((resolve) => child.once("exit", () => resolve()));
  return async () => {
    child.kill("SIGTERM");
    const late = setTimeout(() => child.kill("SIGKILL"), 5000);
    await ended;
    clearTimeout(late);
  };
}

test("a browser reads the worked store over HTTP ranges", async (t) => {
  const command = browser();
  if (command === undefined) {
    assert.ok(process.env["CI"] === undefined, "chromium is needed where CI is set");
    return t.skip("chromium is not installed");
  }
  const directory = mkdtempSync(join(tmpdir(), "deltaformat-browser-"));
  mkdirSync(join(directory, "profile"));
  cpSync(WORKED, join(directory, "store"), { recursive: true });
  await build({ entryPoints: [PAGE], bundle: true, format: "esm", outfile: join(directory, "page.js"), platform: "browser", target: "es2022" });
  writeFileSync(join(directory, "page.html"), '<!doctype html><script type="module" src="/page.js"></script>');
  let report: (text: string) => void = () => {};
  const reported = new Promise<string>((resolve) => (report = resolve));
  const server = await FileServer.start(directory, {
    extra: (request, response) => {
      if (request.method === "POST") {
        let body = "";
        request.setEncoding("utf8").on("data", (part: string) => (body += part)).on("end", () => report(body));
        response.end();
        return true;
      }
      // Module scripts need their type.
      if (request.url!.endsWith(".js")) response.setHeader("content-type", "text/javascript");
      if (request.url!.endsWith(".html")) response.setHeader("content-type", "text/html");
      return false;
    },
  });
  const timer = setTimeout(() => report('{"error":"the page did not report"}'), TIMEOUT_MS);
  const stop = start(command, join(directory, "profile"), `${server.url}page.html`);
  try {
    const version = await (await openStore(WORKED)).version({ branch: "main" });
    const tensors: Record<string, string> = {};
    for (const name of version.names()) tensors[name] = sha256((await version.getTensor(name)).bytes);
    assert.deepEqual(JSON.parse(await reported), { root: version.root, tensors });
    const ranged = server.served.filter((s) => s.path.startsWith("store/packs/"));
    assert.ok(ranged.length > 0 && ranged.every((s) => s.status === 206));
  } finally {
    clearTimeout(timer);
    await stop();
    await server.stop();
    rmSync(directory, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
  }
});
