/** A loopback server with range support that counts what it sends. */
import { readFileSync, statSync } from "node:fs";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { join, normalize } from "node:path";

export interface Served {
  readonly path: string;
  readonly bytes: number;
  readonly status: number;
}

type Handler = (request: IncomingMessage, response: ServerResponse) => boolean;

export class FileServer {
  readonly served: Served[] = [];
  /** Paths that answer with this status instead. */
  readonly failing = new Map<string, number>();
  private readonly server: Server;

  private constructor(private readonly directory: string, private readonly ranges: boolean, extra: Handler) {
    this.server = createServer((request, response) => {
      if (!extra(request, response)) this.answer(request, response);
    });
  }

  static async start(directory: string, { ranges = true, extra = (() => false) as Handler } = {}): Promise<FileServer> {
    const server = new FileServer(directory, ranges, extra);
    await new Promise<void>((resolve) => server.server.listen(0, "127.0.0.1", resolve));
    return server;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.server.address() as AddressInfo).port}/`;
  }

  /** Bytes sent of objects below a prefix. */
  bytes(prefix: string): number {
    return this.served.filter((s) => s.path.startsWith(prefix)).reduce((sum, s) => sum + s.bytes, 0);
  }

  async stop(): Promise<void> {
    this.server.closeAllConnections();
    await new Promise((resolve) => this.server.close(resolve));
  }

  private answer(request: IncomingMessage, response: ServerResponse): void {
    const path = normalize(decodeURIComponent(new URL(request.url!, this.url).pathname)).slice(1);
    const end = (status: number, body: Uint8Array | string = "", headers: Record<string, string> = {}): void => {
      this.served.push({ path, bytes: body.length, status });
      response.writeHead(status, { "content-length": String(body.length), "access-control-allow-origin": "*", ...headers });
      response.end(body);
    };
    const failing = this.failing.get(path);
    if (failing !== undefined) return end(failing);
    let content: Uint8Array;
    try {
      const file = join(this.directory, path);
      if (!statSync(file).isFile()) return end(404);
      content = readFileSync(file);
    } catch {
      return end(404);
    }
    const range = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range ?? "");
    if (range === null || !this.ranges) return end(200, content);
    const from = Number(range[1]);
    const to = Math.min(Number(range[2]) + 1, content.length);
    if (from >= content.length) return end(416, "", { "content-range": `bytes */${content.length}` });
    end(206, content.subarray(from, to), { "content-range": `bytes ${from}-${to - 1}/${content.length}` });
  }
}
