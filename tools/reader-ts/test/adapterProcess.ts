/** The adapter as the conformance runner sees it: a process that answers lines. */
import { type ChildProcess, spawn } from "node:child_process";
import { createInterface, type Interface } from "node:readline";
import { fileURLToPath } from "node:url";

const ADAPTER = fileURLToPath(new URL("../../dist/adapter.js", import.meta.url));

export type Reply = Record<string, unknown> & { id: number; result: string };

export class Adapter {
  private readonly process: ChildProcess;
  private readonly lines: AsyncIterator<string>;
  private readonly reader: Interface;
  private id = 0;

  constructor() {
    this.process = spawn(process.execPath, [ADAPTER], { stdio: ["pipe", "pipe", "inherit"] });
    this.reader = createInterface({ input: this.process.stdout! });
    this.lines = this.reader[Symbol.asyncIterator]();
  }

  async ask(request: Record<string, unknown>): Promise<Reply> {
    this.process.stdin!.write(`${JSON.stringify({ id: ++this.id, ...request })}\n`);
    const { done, value } = await this.lines.next();
    if (done === true) throw new Error("the adapter ended");
    return JSON.parse(value) as Reply;
  }

  async close(): Promise<void> {
    const ended = new Promise((resolve) => this.process.once("exit", resolve));
    this.process.stdin!.end();
    await ended;
    this.reader.close();
  }
}
