/** External objects (SPEC 10.2): which URLs may be read, and where their copies in the store lie. */
import { fail, isError } from "./errors.js";
import { fetchRange } from "./httpStore.js";
import { externalKey } from "./keys.js";
import type { PackEntry } from "./manifestMeta.js";
import { exactly } from "./pieces.js";
import type { RangeOf, Store } from "./store.js";

export interface ExternalOptions {
  /** Prefixes of URLs that may be read besides `hf:` ones. Each ends at a `/` of the URL, or is all of it. */
  allow?: readonly string[];
  /** Where `hf:` objects are fetched. */
  hfEndpoint?: string;
  fetch?: typeof fetch;
  /** How `file:` URLs are read, where that is possible. */
  readFile?: (path: string, start: number, end: number) => Promise<RangeOf | null>;
}

const MAX_URL = 4096;
const TIMEOUT_MS = 30_000;
const PART = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}";
const HF = new RegExp(`^hf://(${PART})/(${PART})@([0-9a-f]{40})/(.+)$`, "su");
const HF_FORBIDDEN = /[\u0000-\u001f\u007f-\u009f\\?#%]/;

export class ExternalReader {
  /** Objects whose copy was needed once: it is asked first from then on. */
  private readonly useCopy = new Set<string>();

  constructor(private readonly store: Store, private readonly options: ExternalOptions) {}

  /** DF-EXT-03: the object itself, and where that fails the store's copy. */
  async getRange(pack: PackEntry, start: number, end: number): Promise<Uint8Array> {
    if (this.useCopy.has(pack.sha256!)) return this.copy(pack, start, end);
    try {
      const found = await this.original(pack.source, start, end);
      if (found === null) fail("object-missing", "an external object is missing");
      if ((found.size ?? pack.size) !== pack.size || found.bytes.length !== end - start) {
        fail("size-mismatch", "an external object does not have its stated size");
      }
      return found.bytes;
    } catch (e) {
      if (await this.turnToCopy(pack)) return this.copy(pack, start, end);
      if (isError(e)) throw e;
      return fail("store-failed", "an external object could not be read", e);
    }
  }

  /** From now on the store's copy is read; false if there is none. Called also where bytes did not verify. */
  async turnToCopy(pack: PackEntry): Promise<boolean> {
    const sha256 = pack.sha256!;
    if (this.useCopy.has(sha256)) return true;
    if ((await this.store.getRange(externalKey(sha256), 0, 1)) === null) return false;
    this.useCopy.add(sha256);
    return true;
  }

  private async copy(pack: PackEntry, start: number, end: number): Promise<Uint8Array> {
    const key = externalKey(pack.sha256!);
    return exactly(await this.store.getRange(key, start, end), end - start, key);
  }

  private async original(url: string, start: number, end: number): Promise<RangeOf | null> {
    const fetcher = this.options.fetch ?? globalThis.fetch.bind(globalThis);
    // DF-EXT-02: no headers of the store's, no cookies.
    const init: RequestInit = { credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) };
    if (url.length > 2 * MAX_URL || [...url].length > MAX_URL) refuse();
    const hub = hfUrl(url, this.options.hfEndpoint ?? "https://huggingface.co");
    if (hub !== null) return fetchRange(hub, start, end, fetcher, init);
    if (!(this.options.allow ?? []).some((prefix) => isPrefix(prefix, url))) refuse(); // DF-EXT-01
    if (/^https?:/.test(url)) {
      // Only URLs in normal form: what is compared with the prefix is what is fetched. A redirect could lead elsewhere.
      if (!URL.canParse(url) || new URL(url).href !== url) refuse();
      return fetchRange(new URL(url), start, end, fetcher, { ...init, redirect: "error" });
    }
    if (url.startsWith("file:")) {
      if (this.options.readFile === undefined) fail("not-supported", "file URLs cannot be read here");
      return this.options.readFile(filePath(url), start, end);
    }
    return fail("not-supported", "a URL of a scheme that cannot be read");
  }
}

function refuse(): never {
  return fail("external-refused", "an external URL is not allowed");
}

export function isPrefix(prefix: string, url: string): boolean {
  if (!url.startsWith(prefix) || prefix === "") return false;
  return prefix.length === url.length || prefix.endsWith("/") || url[prefix.length] === "/";
}

/** The address of an `hf:` object, or null if the URL is not of that form. */
export function hfUrl(url: string, endpoint: string): URL | null {
  const match = HF.exec(url);
  if (match === null) return null;
  const [, namespace, repository, commit, path] = match;
  const segments = path.split("/");
  if (HF_FORBIDDEN.test(path) || segments.some((s) => s === "" || s === "." || s === "..")) return null;
  const address = [namespace, repository, "resolve", commit, ...segments].map(encodeURIComponent).join("/");
  return new URL(`${endpoint.replace(/\/$/, "")}/${address}`);
}

/** RFC 8089. No segment may lead out of an allowed directory, also not an encoded one. */
export function filePath(url: string): string {
  const match = /^file:(?:\/\/(?:localhost)?)?(\/(?!\/)[^?#]*)$/.exec(url);
  if (match === null) refuse();
  let segments: string[];
  try {
    segments = match[1].split("/").map(decodeURIComponent);
  } catch {
    refuse();
  }
  if (segments.some((s) => s === "." || s === ".." || /[/\\\0]/.test(s))) refuse();
  return segments.join("/");
}
