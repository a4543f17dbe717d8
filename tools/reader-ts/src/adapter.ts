/** Answers the requests of the conformance suite, one JSON object a line (conformance/PROTOCOL.md). */
import { createInterface } from "node:readline";
import { answer } from "./adapterOps.js";

const lines = createInterface({ input: process.stdin, crlfDelay: Number.POSITIVE_INFINITY });
for await (const line of lines) {
  if (line.trim() !== "") process.stdout.write(`${JSON.stringify(await answer(line))}\n`);
}
