import { fail } from "./errors.js";
import { type Hashes, hex } from "./hash.js";

const ENDING = 76;
const SHAPE = /^,"check":"([0-9a-f]{64})"\}$/;

/** DF-JSN-03: the object ends with the hash of all bytes before that ending. */
export function checkedBody(bytes: Uint8Array, what: string, hashes: Hashes): void {
  const at = bytes.length - ENDING;
  const found = at < 0 ? null : SHAPE.exec(String.fromCharCode(...bytes.subarray(at)));
  if (found === null) fail("json-invalid", `${what} does not end with its check digits`);
  if (hex(hashes.sha256(bytes.subarray(0, at))) !== found[1]) {
    fail("hash-mismatch", `${what} does not have the hash that its check digits state`);
  }
}
