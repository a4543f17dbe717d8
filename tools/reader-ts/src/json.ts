import { fail } from "./errors.js";

/** A number that is no integer in ±(2^53 - 1): allowed in members that this format does not read. */
export class OtherNumber {
  constructor(readonly value: number) {}
}

export type JsonObject = Map<string, Json>;
export type Json = null | boolean | number | string | OtherNumber | Json[] | JsonObject;

/** What a caller sees of `metadata`: ordinary values. */
export type PlainJson = null | boolean | number | string | PlainJson[] | { [name: string]: PlainJson };

const MAX_DEPTH = 32; // DF-JSN-01
const SPACE = /[ \t\n\r]*/y;
const CHARACTERS = /[^"\\\u0000-\u001f]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const LONE_SURROGATE = /\p{Surrogate}/u;

/** Beyond these an object is refused with LIMIT. */
export interface JsonBounds {
  /** Objects and arrays. */
  readonly containers?: number;
  /** Values of any kind. */
  readonly values?: number;
}

function invalid(message: string): never {
  return fail("json-invalid", message);
}

/**
 * I-JSON (RFC 7493), strictly: what JSON.parse lets pass (duplicate names, lone surrogates, numbers that overflow, any
 * depth) is rejected here (DF-JSN-01).
 */
class Parser {
  private at = 0;
  containers = 0;
  private values = 0;

  constructor(private readonly text: string, private readonly bounds: JsonBounds) {}

  document(): JsonObject {
    this.space();
    if (this.text[this.at] !== "{") invalid("not a JSON object");
    const value = this.object(1);
    this.space();
    if (this.at !== this.text.length) invalid("text after the JSON object");
    return value;
  }

  private space(): void {
    SPACE.lastIndex = this.at;
    SPACE.test(this.text);
    this.at = SPACE.lastIndex;
  }

  private enter(depth: number): void {
    if (depth > MAX_DEPTH) invalid(`JSON nested deeper than ${MAX_DEPTH}`);
    if (++this.containers > (this.bounds.containers ?? Number.POSITIVE_INFINITY)) {
      fail("limit-exceeded", `more than ${this.bounds.containers} objects and arrays in one JSON object`);
    }
    this.at++;
    this.space();
  }

  private value(depth: number): Json {
    if (++this.values > (this.bounds.values ?? Number.POSITIVE_INFINITY)) {
      fail("limit-exceeded", `more than ${this.bounds.values} values in one JSON object`);
    }
    switch (this.text[this.at]) {
      case "{": return this.object(depth);
      case "[": return this.array(depth);
      case '"': return this.string();
      case "t": return this.word("true", true);
      case "f": return this.word("false", false);
      case "n": return this.word("null", null);
      default: return this.number();
    }
  }

  private word<T>(word: string, value: T): T {
    if (!this.text.startsWith(word, this.at)) invalid("not a JSON value");
    this.at += word.length;
    return value;
  }

  private object(depth: number): JsonObject {
    this.enter(depth);
    const result: JsonObject = new Map();
    if (this.text[this.at] === "}") {
      this.at++;
      return result;
    }
    for (;;) {
      if (this.text[this.at] !== '"') invalid("a member name is missing");
      const name = this.string();
      if (result.has(name)) invalid("a member name occurs twice");
      this.space();
      if (this.text[this.at++] !== ":") invalid("a colon is missing");
      this.space();
      result.set(name, this.value(depth + 1));
      this.space();
      const c = this.text[this.at++];
      if (c === "}") return result;
      if (c !== ",") invalid("an object is not closed");
      this.space();
    }
  }

  private array(depth: number): Json[] {
    this.enter(depth);
    const result: Json[] = [];
    if (this.text[this.at] === "]") {
      this.at++;
      return result;
    }
    for (;;) {
      result.push(this.value(depth + 1));
      this.space();
      const c = this.text[this.at++];
      if (c === "]") return result;
      if (c !== ",") invalid("an array is not closed");
      this.space();
    }
  }

  /** Finds the end of the string; what is between, escapes included, is left to JSON.parse, which is strict in that. */
  private string(): string {
    const start = this.at++;
    let escaped = false;
    for (;;) {
      CHARACTERS.lastIndex = this.at;
      CHARACTERS.test(this.text);
      this.at = CHARACTERS.lastIndex;
      const c = this.text[this.at++];
      if (c === '"') break;
      if (c !== "\\") invalid("a string is not closed or holds a control character");
      escaped = true;
      this.at++;
    }
    if (!escaped) return this.text.slice(start + 1, this.at - 1);
    const result = unescaped(this.text.slice(start, this.at));
    if (LONE_SURROGATE.test(result)) invalid("a lone surrogate");
    return result;
  }

  private number(): number | OtherNumber {
    NUMBER.lastIndex = this.at;
    const match = NUMBER.exec(this.text);
    if (match === null) invalid("not a JSON value");
    this.at = NUMBER.lastIndex;
    const value = Number(match[0]);
    if (!Number.isFinite(value)) invalid("a number beyond binary64");
    const integer = match[1] === undefined && match[2] === undefined && Number.isSafeInteger(value);
    return integer ? value + 0 : new OtherNumber(value); // -0 + 0 is 0
  }
}

function unescaped(literal: string): string {
  try {
    return JSON.parse(literal) as string;
  } catch {
    return invalid("an escape that is not valid");
  }
}

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function decodeUtf8(bytes: Uint8Array): string | null {
  try {
    return UTF8.decode(bytes);
  } catch {
    return null;
  }
}

export function parseJson(bytes: Uint8Array, bounds: JsonBounds = {}): JsonObject {
  return parseCounted(bytes, bounds).object;
}

/** The object, and how many objects and arrays it is made of. */
export function parseCounted(bytes: Uint8Array, bounds: JsonBounds): { object: JsonObject; containers: number } {
  const text = decodeUtf8(bytes);
  if (text === null) invalid("not UTF-8");
  const parser = new Parser(text, bounds);
  return { object: parser.document(), containers: parser.containers };
}

export function toPlain(value: Json): PlainJson {
  if (value instanceof OtherNumber) return value.value;
  if (Array.isArray(value)) return value.map(toPlain);
  if (value instanceof Map) {
    // defineProperty semantics: a member named __proto__ is a member like any other.
    return Object.fromEntries([...value].map(([name, member]) => [name, toPlain(member)]));
  }
  return value;
}
