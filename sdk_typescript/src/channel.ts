/**
 * The app's side of the control channel: connects, resumes, sends again, and hands instructions on, one by one.
 * The exchange is described in docs/control-channel.md.
 */

import { randomBytes } from "node:crypto";
import WebSocket from "ws";

export interface Instruction {
  type: "instruct";
  seq: number;
  id: string;
  do: "route" | "switch" | "warm";
  target: string;
  model: string;
  reason: string;
}

type Body = Record<string, unknown>;
type Kind = "done" | "failed" | "part" | "answer";

export interface ChannelParts {
  url: string;
  key?: string;
  device?: string;
  session?: string;
  /** Carries an instruction out; what it returns is its result, what it throws a failed one. */
  obey: (order: Instruction) => Promise<Body>;
  /** Engines and models of this app, told at each connection. */
  about: () => { engines: string[]; models: string[] };
}

const SCHEMA = "midstream.channel/1.0";
const PATH = "/midstream/v1/channel";
const MAX_WAITING = 10_000;
const MAX_FRAME_BYTES = 64 << 10;
const FIRST_WAIT_MS = 200;
const LONGEST_WAIT_MS = 30_000;
const BEATS_PER_HEARTBEAT = 3;
const SILENT_BEATS = 2;

export class Channel {
  readonly session: string;
  connections = 0;
  /** Instructions that the gateway gave up, for too many waited for this app's acknowledgement. */
  lost = 0;
  private readonly waiting = new Map<number, Buffer>();
  private last = 0;
  private taken = 0;
  private socket: WebSocket | undefined;
  private welcomed = false;
  private heard = 0;
  private waitMs = FIRST_WAIT_MS;
  private closed = false;
  private timer: NodeJS.Timeout | undefined;
  private beating: NodeJS.Timeout | undefined;
  private orders: Promise<void> = Promise.resolve();
  private watchers: { check: () => boolean; done: () => void }[] = [];

  constructor(private readonly parts: ChannelParts) {
    this.session = parts.session ?? randomBytes(16).toString("hex");
    this.connect();
  }

  /** Results that the gateway has not confirmed. */
  get unconfirmed(): number {
    return this.waiting.size;
  }

  connected(timeoutMs = 10_000): Promise<void> {
    return this.until(() => this.welcomed, timeoutMs);
  }

  settled(timeoutMs = 10_000): Promise<void> {
    return this.until(() => this.waiting.size === 0, timeoutMs);
  }

  /** Send a result now or when the gateway is back. Throws when too many wait or it is too large. */
  report(of: string, kind: Kind, body: Body): void {
    if (this.waiting.size >= MAX_WAITING) throw new Error(`${MAX_WAITING} results wait for an acknowledgement`);
    const data = Buffer.from(JSON.stringify({ type: "result", seq: this.last + 1, of, kind, body }));
    if (data.length > MAX_FRAME_BYTES) throw new Error(`a result of ${data.length} bytes; send it in parts`);
    this.last += 1;
    this.waiting.set(this.last, data);
    if (this.welcomed) this.socket?.send(data);
  }

  async close(): Promise<void> {
    this.closed = true;
    clearTimeout(this.timer);
    clearInterval(this.beating);
    const socket = this.socket;
    if (socket === undefined || socket.readyState === WebSocket.CLOSED) return;
    if (this.welcomed) this.send({ type: "bye", reason: "the app ends" });
    await new Promise<void>((resolve) => {
      const late = setTimeout(() => socket.terminate(), 1_000);
      socket.once("close", () => {
        clearTimeout(late);
        resolve();
      });
      socket.close();
    });
  }

  private connect(): void {
    const url = new URL(PATH, this.parts.url);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const headers = this.parts.key ? { authorization: `Bearer ${this.parts.key}` } : {};
    const socket = new WebSocket(url, { headers, maxPayload: MAX_FRAME_BYTES, handshakeTimeout: 10_000 });
    this.socket = socket;
    socket.on("open", () => {
      const hello = { type: "hello", schema: SCHEMA, session: this.session, received: this.taken };
      this.send({ ...hello, device: this.parts.device ?? "", ...this.parts.about() });
    });
    socket.on("message", (data: Buffer) => this.take(data));
    socket.on("error", () => undefined);
    socket.on("close", () => this.again());
  }

  private again(): void {
    this.waitMs = this.welcomed ? FIRST_WAIT_MS : Math.min(LONGEST_WAIT_MS, 2 * this.waitMs);
    this.welcomed = false;
    clearInterval(this.beating);
    if (!this.closed) this.timer = setTimeout(() => this.connect(), this.waitMs * Math.random());
  }

  private take(data: Buffer): void {
    this.heard = performance.now();
    let frame: { type?: string; seq?: number; received?: number; heartbeat_s?: number; lost?: number };
    try {
      frame = JSON.parse(data.toString("utf8")) as typeof frame;
    } catch {
      this.socket?.terminate();
      return;
    }
    if (frame.type === "welcome") {
      this.lost += frame.lost ?? 0;
      this.welcome(frame.received ?? 0, frame.heartbeat_s ?? 15);
    }
    if (frame.type === "ack") this.confirm(frame.seq ?? 0);
    else if (frame.type === "instruct") this.order(frame as Instruction);
    else if (frame.type === "bye") this.socket?.close();
  }

  private welcome(received: number, heartbeatS: number): void {
    const within = this.last - this.waiting.size <= received && received <= this.last;
    if (this.connections > 0 && within) this.confirm(received);
    else this.renumber(received);
    for (const data of this.waiting.values()) this.socket?.send(data);
    this.welcomed = true;
    this.connections += 1;
    this.beating = setInterval(() => this.beat(heartbeatS), (1_000 * heartbeatS) / BEATS_PER_HEARTBEAT);
    this.look();
  }

  /** What waits is new to the gateway, which counts from `received`: it has lost numbers, or this app was restarted. */
  private renumber(received: number): void {
    const frames = [...this.waiting.values()].map((data) => JSON.parse(data.toString("utf8")) as Body);
    this.waiting.clear();
    this.last = received;
    for (const frame of frames) {
      this.last += 1;
      this.waiting.set(this.last, Buffer.from(JSON.stringify({ ...frame, seq: this.last })));
    }
  }

  private beat(heartbeatS: number): void {
    if (performance.now() - this.heard > 1_000 * SILENT_BEATS * heartbeatS) this.socket?.terminate();
    else this.send({ type: "beat" });
  }

  /** What was read here is obeyed here, once, also over a new connection. */
  private order(order: Instruction): void {
    if (order.seq === this.taken + 1) {
      this.taken = order.seq;
      this.orders = this.orders.then(() => this.obey(order));
    }
    this.send({ type: "ack", seq: this.taken });
  }

  private async obey(order: Instruction): Promise<void> {
    try {
      this.report(order.id, "done", { do: order.do, ...(await this.parts.obey(order)) });
    } catch (error) {
      const message = error instanceof Error ? error.message : String(error);
      const code = error instanceof Error && "code" in error ? String(error.code) : "error";
      if (this.waiting.size < MAX_WAITING) {
        this.report(order.id, "failed", { do: order.do, code, message: message.slice(0, 500) });
      }
    }
  }

  private confirm(seq: number): void {
    for (const number of this.waiting.keys()) {
      if (number > seq) break;
      this.waiting.delete(number);
    }
    this.look();
  }

  private send(frame: Body): void {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(Buffer.from(JSON.stringify(frame)));
  }

  private until(check: () => boolean, timeoutMs: number): Promise<void> {
    if (check()) return Promise.resolve();
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => reject(new Error(`not within ${timeoutMs} ms`)), timeoutMs);
      this.watchers.push({
        check,
        done: () => {
          clearTimeout(late);
          resolve();
        },
      });
    });
  }

  private look(): void {
    this.watchers = this.watchers.filter((watcher) => {
      if (!watcher.check()) return true;
      watcher.done();
      return false;
    });
  }
}
