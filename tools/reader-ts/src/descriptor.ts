import { checkedBody } from "./check.js";
import { fail } from "./errors.js";
import { checkRequires, Fields } from "./fields.js";
import { type Digest, digestNamed, type Hashes } from "./hash.js";
import { parseJson } from "./json.js";
import { HEX32 } from "./keys.js";

const LOG = "log/{seq:020}.json";
const MIN_BLOCK = 256;
const MAX_BLOCK = 64 * 1024 * 1024;

/** SPEC 6.2 */
export interface Descriptor {
  readonly uuid: string;
  readonly digest: Digest;
  readonly blockBytes: number;
}

/** DF-DSC-01 */
export function isBlockSize(bytes: number): boolean {
  return bytes >= MIN_BLOCK && bytes <= MAX_BLOCK && (bytes & (bytes - 1)) === 0;
}

export function parseDescriptor(bytes: Uint8Array, hashes: Hashes): Descriptor {
  checkedBody(bytes, "the descriptor", hashes);
  const fields = new Fields(parseJson(bytes), "descriptor");
  if (fields.string("format") !== "deltaformat/1") fail("format-unknown", "unknown format"); // DF-DSC-02
  checkRequires(fields);
  if (fields.string("log") !== LOG) fail("format-unknown", "unknown log grammar");
  const digest = digestNamed(fields.string("digest"), hashes);
  const blockBytes = fields.integer("block_bytes");
  if (!isBlockSize(blockBytes)) fail("value-invalid", `a block size of ${blockBytes}`);
  fields.string("time");
  return { uuid: fields.matching("uuid", HEX32), digest, blockBytes };
}
