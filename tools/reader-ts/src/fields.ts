import { fail, quote } from "./errors.js";
import type { Json, JsonObject } from "./json.js";

/** Reads members of a JSON object by type; a member that is missing or of another type is MALFORMED (DF-JSN-01). */
export class Fields {
  constructor(readonly object: JsonObject, readonly what: string) {}

  static of(value: Json, what: string): Fields {
    if (!(value instanceof Map)) fail("json-invalid", `${what} is not an object`);
    return new Fields(value, what);
  }

  has(name: string): boolean {
    return this.object.has(name);
  }

  get(name: string): Json {
    const value = this.object.get(name);
    if (value === undefined) fail("json-invalid", `${this.what}: member ${quote(name)} is missing`);
    return value;
  }

  private wrong(name: string, type: string): never {
    return fail("json-invalid", `${this.what}: member ${quote(name)} is not ${type}`);
  }

  string(name: string): string {
    const value = this.get(name);
    return typeof value === "string" ? value : this.wrong(name, "a string");
  }

  stringOrNull(name: string): string | null {
    return this.get(name) === null ? null : this.string(name);
  }

  matching(name: string, grammar: RegExp): string {
    const value = this.string(name);
    if (!grammar.test(value)) fail("value-invalid", `${this.what}: ${name} ${quote(value)} is not valid`);
    return value;
  }

  boolean(name: string): boolean {
    const value = this.get(name);
    return typeof value === "boolean" ? value : this.wrong(name, "true or false");
  }

  /** SPEC 2: an integer member is from 0 to 2^53 - 1. */
  integer(name: string): number {
    const value = this.signed(name);
    if (value < 0) fail("value-invalid", `${this.what}: ${name} is negative`);
    return value;
  }

  signed(name: string): number {
    const value = this.get(name);
    return typeof value === "number" ? value : this.wrong(name, "an integer");
  }

  integerOrNull(name: string): number | null {
    return this.get(name) === null ? null : this.integer(name);
  }

  array(name: string): Json[] {
    const value = this.get(name);
    return Array.isArray(value) ? value : this.wrong(name, "an array");
  }

  objects(name: string): Fields[] {
    return this.array(name).map((entry) => Fields.of(entry, `${this.what}: an entry of ${name}`));
  }

  integers(name: string): number[] {
    return this.array(name).map((entry) => integerEntry(entry, `${this.what}: an entry of ${name}`));
  }

  child(name: string): Fields {
    return Fields.of(this.get(name), `${this.what}: ${name}`);
  }
}

export function integerEntry(entry: Json, what: string): number {
  if (typeof entry !== "number") fail("json-invalid", `${what} is not an integer`);
  if (entry < 0) fail("value-invalid", `${what} is negative`);
  return entry;
}

/** DF-VER-01: version 1.0 defines no feature, so every name is unknown. Called before other members are read. */
export function checkRequires(fields: Fields): void {
  for (const feature of fields.array("requires")) {
    if (typeof feature !== "string") fail("json-invalid", `${fields.what}: a feature name is not a string`);
    fail("feature-unknown", `${fields.what} requires the unknown feature ${quote(feature)}`);
  }
}
