import { fail, quote } from "./errors.js";

/** The grammar of SPEC 6. Every key that a record or manifest names is matched in full (DF-KEY-01). */
const CLAIM = "[0-9]{20}";
const SHA = "[0-9a-f]{64}";
const MANIFEST = new RegExp(`^manifests/(${CLAIM})/(${SHA})\\.arrow\\.zst$`);
const PACK = new RegExp(`^packs/(${CLAIM})/(${SHA})\\.safetensors$`);
const FILE = new RegExp(`^files/(${CLAIM})/(${SHA})$`);

export const HEX32 = /^[0-9a-f]{32}$/;
export const HEX64 = /^[0-9a-f]{64}$/;
/** DF-LOG-01 */
export const NAME = /^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$/;

export const DESCRIPTOR_KEY = "deltaformat.json";
export const HINT_KEY = "hints/tail.json";

export interface ParsedKey {
  readonly claim: string;
  readonly sha256: string;
}

export function recordKey(seq: number): string {
  return `log/${pad20(seq)}.json`;
}

export function pad20(seq: number): string {
  return String(seq).padStart(20, "0");
}

export function externalKey(sha256: string): string {
  return `packs/external/${sha256}`;
}

function match(key: string, grammars: readonly RegExp[], what: string): ParsedKey {
  for (const grammar of grammars) {
    const found = grammar.exec(key);
    if (found !== null) return { claim: found[1], sha256: found[2] };
  }
  return fail("value-invalid", `${quote(key)} is not the key of ${what}`);
}

export const manifestKey = (key: string): ParsedKey => match(key, [MANIFEST], "a manifest");
export const packKey = (key: string): ParsedKey => match(key, [PACK], "a pack");
export const fileKey = (key: string): ParsedKey => match(key, [FILE], "a file");
export const packOrFileKey = (key: string): ParsedKey => match(key, [PACK, FILE], "a pack or a file");
