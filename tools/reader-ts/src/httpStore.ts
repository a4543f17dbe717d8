import { fail } from "./errors.js";
import type { RangeOf, Store } from "./store.js";

export interface HttpOptions {
  /** Sent with every request to the store, and to the store only. */
  headers?: Record<string, string>;
  fetch?: typeof fetch;
}

/** A store below an HTTP or HTTPS URL, read with range requests. */
export class HttpStore implements Store {
  private readonly base: URL;
  private readonly init: RequestInit;
  private readonly fetch: typeof fetch;

  constructor(base: string | URL, options: HttpOptions = {}) {
    this.base = new URL(base);
    if (!this.base.pathname.endsWith("/")) this.base.pathname += "/";
    this.init = { headers: options.headers ?? {} };
    this.fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
  }

  /** Keys are made of characters that need no escape. */
  private url(key: string): URL {
    const url = new URL(this.base);
    url.pathname += key;
    return url;
  }

  get(key: string, max: number): Promise<Uint8Array | null> {
    return this.getRange(key, 0, max + 1);
  }

  async getRange(key: string, start: number, end: number): Promise<Uint8Array | null> {
    // Which records exist, and the hint, change: a cache must ask. Other objects do not change (DF-STO-01).
    const cache: RequestCache = /^(?:log|hints)\//.test(key) ? "no-cache" : "default";
    return (await fetchRange(this.url(key), start, end, this.fetch, { ...this.init, cache }))?.bytes ?? null;
  }
}

/** Bytes [start, end) of what a URL names, and its size if the server tells; null if there is nothing. */
export async function fetchRange(
  url: URL, start: number, end: number, fetcher: typeof fetch, init: RequestInit,
): Promise<RangeOf | null> {
  const headers = new Headers(init.headers);
  headers.set("range", `bytes=${start}-${end - 1}`);
  const response = await fetcher(url, { ...init, headers });
  try {
    switch (response.status) {
      case 206:
        return { size: totalSize(response, start), bytes: await readBody(response, 0, end - start) };
      case 200: // the server does not know ranges, or the range is all of it
        return { size: null, bytes: await readBody(response, start, end) };
      case 404:
      case 410:
        return null;
      case 416: // the object ends before `start`
        return { size: null, bytes: new Uint8Array(0) };
      default:
        return fail("store-failed", `a server answered with status ${response.status}`);
    }
  } finally {
    // An unread rest must not keep the connection.
    if (response.body !== null && !response.body.locked) await response.body.cancel();
  }
}

/**
 * The size that a 206 states. One of another range than was asked for would be taken for its bytes, so that is a failure.
 * The header can be hidden by CORS.
 */
function totalSize(response: Response, start: number): number | null {
  const header = response.headers.get("content-range");
  if (header === null) return null;
  const match = /^bytes ([0-9]+)-[0-9]+\/(?:([0-9]+)|\*)$/.exec(header);
  if (match === null || Number(match[1]) !== start) fail("store-failed", "a server answered with another range");
  return match[2] === undefined ? null : Number(match[2]);
}

/** Bytes [start, end) of a body, without holding more of it. */
async function readBody(response: Response, start: number, end: number): Promise<Uint8Array> {
  if (response.body === null) return new Uint8Array(0);
  const reader = response.body.getReader();
  const chunks: Uint8Array[] = [];
  let at = 0;
  let kept = 0;
  try {
    while (at < end) {
      const { done, value } = await reader.read();
      if (done) break;
      const part = value.subarray(Math.max(0, start - at), Math.max(0, end - at));
      at += value.length;
      kept += part.length;
      if (part.length > 0) chunks.push(part);
    }
  } finally {
    await reader.cancel();
    reader.releaseLock();
  }
  if (chunks.length === 1) return chunks[0];
  const bytes = new Uint8Array(kept);
  let to = 0;
  for (const chunk of chunks) {
    bytes.set(chunk, to);
    to += chunk.length;
  }
  return bytes;
}
