/** I-JSON as SPEC 6.1 asks for it. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Fields } from "../src/fields.js";
import { type JsonBounds, parseJson, toPlain } from "../src/json.js";

const encoder = new TextEncoder();
const parse = (text: string, bounds?: JsonBounds) => parseJson(encoder.encode(text), bounds);

test("what is valid", () => {
  const text = '{ "a" : [1, -0, 2.5, 1e3, true, false, null, "x\\u00e9\\ud83d\\ude00\\n"], "__proto__": {"b": {}}, "n": 9007199254740993 }';
  assert.deepEqual(toPlain(parse(text)), JSON.parse(text.replace("-0", "0")));
  assert.ok(Object.hasOwn(toPlain(parse(text)) as object, "__proto__"));
  const fields = new Fields(parse('{"a":-0,"b":9007199254740991}'), "test");
  assert.ok(Object.is(fields.integer("a"), 0));
  assert.equal(fields.integer("b"), 2 ** 53 - 1);
});

test("what is not", () => {
  for (const text of [
    "", "[]", "1", "{", '{"a":1,}', '{"a" 1}', '{"a":01}', '{"a":+1}', '{"a":.5}', '{"a":1.}', '{"a":NaN}', '{"a":1}x', "{'a':1}",
    '{"a":1,"a":2}', '{"a":1,"\\u0061":2}', '{"a":"\\ud800"}', '{"a":"\\udc00\\ud800"}', '{"a":"\\x"}', '{"a":"\\u12g4"}', '{"a":"\t"}',
    '{"a":1e400}', `{"a":${"9".repeat(400)}}`, '\ufeff{"a":1}', '{"a":tru}', '{"a":"', '{"a":"\\', '{a:1}', '{"a":[1,]}', '{"a":[1 2]}',
  ]) assert.throws(() => parse(text), { code: "json-invalid" }, text);
  for (const bytes of ["7b2261223a22ff227d", "7b2261223a22eda080227d", "7b2261223a22c080227d"]) {
    assert.throws(() => parseJson(new Uint8Array(Buffer.from(bytes, "hex"))), { code: "json-invalid" });
  }
});

test("depth 32 is allowed, 33 is not", () => {
  const nested = (n: number): string => `{"a":${"[".repeat(n - 1)}${"]".repeat(n - 1)}}`;
  parse(nested(32));
  assert.throws(() => parse(nested(33)), { code: "json-invalid" });
  assert.throws(() => parse(`{"a":${"[".repeat(1e6)}`), { code: "json-invalid" });
});

test("objects, arrays and values are counted", () => {
  parse('{"a":[{},{}]}', { containers: 4 });
  assert.throws(() => parse('{"a":[{},{}]}', { containers: 3 }), { code: "limit-exceeded" });
  parse('{"a":[1,2]}', { values: 3 });
  assert.throws(() => parse('{"a":[1,2]}', { values: 2 }), { code: "limit-exceeded" });
});

test("members by type", () => {
  const fields = new Fields(parse('{"f":1.0,"e":1e0,"big":9007199254740992,"neg":-1,"s":"x"}'), "test");
  for (const name of ["f", "e", "big", "s", "absent"]) assert.throws(() => fields.integer(name), { code: "json-invalid" });
  assert.throws(() => fields.integer("neg"), { code: "value-invalid" });
  assert.equal(fields.signed("neg"), -1);
});
