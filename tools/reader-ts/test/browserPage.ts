/** Runs in the browser: reads the store beside the page and posts what it found. */
import { openStore } from "../src/index.js";

async function read(): Promise<object> {
  const store = await openStore(new URL("/store/", location.href));
  const version = await store.version({ branch: "main" });
  const tensors: Record<string, string> = {};
  for (const name of version.names()) {
    const { bytes } = await version.getTensor(name);
    const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>));
    tensors[name] = [...hash].map((b) => b.toString(16).padStart(2, "0")).join("");
  }
  return { root: version.root, tensors };
}

const result = await read().catch((e: unknown) => ({ error: String(e) }));
await fetch("/result", { method: "POST", body: JSON.stringify(result) });
