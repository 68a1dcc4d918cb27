/** Engines that an app may use by name: anything that streams text for messages; here the one over OpenAI's API. */

export interface Message {
  role: string;
  content: string;
}

/** One piece of an answer. side: which side made it, as the server tells. finish: with the last piece only. */
export interface Completion {
  text: string;
  side?: string;
  finish?: string;
}

export type Options = Record<string, unknown>;

export interface Engine {
  /** The answer in pieces; leaving the loop cancels the generation. Throws EngineError. */
  stream(model: string, messages: readonly Message[], options: Options): AsyncIterable<Completion>;
  close?(): Promise<void> | void;
}

export class EngineError extends Error {
  constructor(message: string, readonly code: string = "engine_error") {
    super(message);
    this.name = "EngineError";
  }
}

/** A server with OpenAI's API: the agent on this device, a gateway, or anybody's. */
export class HttpEngine implements Engine {
  constructor(private readonly baseUrl: string, private readonly key?: string) {}

  async *stream(model: string, messages: readonly Message[], options: Options): AsyncGenerator<Completion> {
    const leaving = new AbortController();
    try {
      const reply = await this.ask({ model, messages, ...options, stream: true }, leaving.signal);
      if (!reply.ok || reply.body === null) throw await refusal(reply);
      let ended = false;
      for await (const data of events(reply.body)) {
        if (data === "[DONE]") {
          ended = true;
          continue;
        }
        const piece = pieceOf(data);
        if (piece !== undefined) yield piece;
      }
      if (!ended) throw new EngineError("the answer was cut before its end; ask again", "stream_truncated");
    } finally {
      leaving.abort();
    }
  }

  private async ask(body: object, signal: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = { "content-type": "application/json", accept: "text/event-stream" };
    if (this.key) headers["authorization"] = `Bearer ${this.key}`;
    try {
      const url = new URL("/v1/chat/completions", this.baseUrl);
      return await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal });
    } catch (error) {
      throw new EngineError(`${this.baseUrl} cannot be reached: ${reasonOf(error)}`, "unreachable");
    }
  }
}

const MAX_EVENT_CHARS = 1 << 20;

/** The data of each server-sent event. */
async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error: unknown) => {
        throw new EngineError(`the answer was cut: ${reasonOf(error)}`, "stream_truncated");
      });
      waiting += decoder.decode(value, { stream: !done });
      const parts = waiting.split(/\r?\n\r?\n/);
      waiting = parts.pop() ?? "";
      if (waiting.length > MAX_EVENT_CHARS) throw new EngineError("an event of the answer is too long", "protocol");
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length > 0) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

interface Chunk {
  error?: { message?: string; code?: string };
  choices?: { delta?: { content?: string | null }; finish_reason?: string | null }[];
  midstream?: { side?: string };
}

function pieceOf(data: string): Completion | undefined {
  let chunk: Chunk;
  try {
    chunk = JSON.parse(data) as Chunk;
  } catch {
    throw new EngineError(`an event of the answer is not JSON: ${data.slice(0, 120)}`, "protocol");
  }
  if (chunk.error) throw new EngineError(chunk.error.message ?? "the answer failed", chunk.error.code);
  const choice = chunk.choices?.[0];
  if (choice === undefined) return undefined;
  const text = choice.delta?.content ?? "";
  const finish = choice.finish_reason ?? undefined;
  if (!text && finish === undefined) return undefined;
  return { text, ...(chunk.midstream?.side ? { side: chunk.midstream.side } : {}), ...(finish ? { finish } : {}) };
}

async function refusal(reply: Response): Promise<EngineError> {
  const text = await reply.text().catch(() => "");
  try {
    const document = JSON.parse(text) as Chunk;
    return new EngineError(document.error?.message ?? `the server answered ${reply.status}`, document.error?.code);
  } catch {
    return new EngineError(`the server answered ${reply.status}`, `http_${reply.status}`);
  }
}

export function reasonOf(error: unknown): string {
  return error instanceof Error ? (error.cause instanceof Error ? error.cause.message : error.message) : String(error);
}
