/** One model as an app uses it: chat(), generate(), warm(), on whichever engine it is told to use. */

import { EngineError, type Completion, type Engine, type Message, type Options } from "./engines.js";

export interface Warmth {
  engine: string;
  model: string;
  cold_ttft_ms: number;
  warm_ttft_ms: number;
}

/** One answer, as the gateway is told of it: numbers, and no word of it. */
export interface Ran {
  engine: string;
  model: string;
  pieces: number;
  ttft_ms: number | null;
  total_ms: number;
  failed: string;
}

export interface HandleParts {
  /** Read at each call; the gateway may have switched it. */
  model: () => string;
  /** Engines by name in the order in which they are tried; read at each call. */
  order: () => readonly string[];
  engines: ReadonlyMap<string, Engine>;
  ran?: (ran: Ran) => void;
}

export class ModelHandle {
  constructor(private readonly parts: HandleParts) {}

  /** The model that the next call asks for. */
  get model(): string {
    return this.parts.model();
  }

  /** The answer in pieces. An engine that fails before its first piece lets the next one try; a later failure throws. */
  async *stream(messages: readonly Message[], options: Options = {}): AsyncGenerator<Completion> {
    const names = this.parts.order();
    for (const [place, name] of names.entries()) {
      const answer = this.one(name, messages, options);
      let first: IteratorResult<Completion>;
      try {
        first = await answer.next();
      } catch (error) {
        if (!(error instanceof EngineError) || place === names.length - 1) throw error;
        continue;
      }
      try {
        if (first.done) return;
        yield first.value;
        yield* answer;
      } finally {
        await answer.return(undefined);
      }
      return;
    }
  }

  /** The whole answer to a conversation. */
  async chat(messages: readonly Message[], options: Options = {}): Promise<string> {
    let text = "";
    for await (const piece of this.stream(messages, options)) text += piece.text;
    return text;
  }

  /** The whole answer to one prompt. */
  generate(prompt: string, options: Options = {}): Promise<string> {
    return this.chat([{ role: "user", content: prompt }], options);
  }

  /** Load the model and tell how long a first token takes, cold and warm. */
  async warm(engine = "", model = ""): Promise<Warmth> {
    const name = engine || (this.parts.order()[0] ?? "");
    const wanted = model || this.model;
    const cold = await this.firstTokenMs(name, wanted);
    return { engine: name, model: wanted, cold_ttft_ms: cold, warm_ttft_ms: await this.firstTokenMs(name, wanted) };
  }

  private async firstTokenMs(name: string, model: string): Promise<number> {
    const begun = performance.now();
    let first: number | undefined;
    const answer = this.engine(name).stream(model, [{ role: "user", content: "Hi" }], { max_tokens: 1, temperature: 0 });
    for await (const _ of answer) first ??= performance.now();
    return (first ?? performance.now()) - begun;
  }

  private async *one(name: string, messages: readonly Message[], options: Options): AsyncGenerator<Completion> {
    const begun = performance.now();
    const model = this.model;
    let pieces = 0;
    let first: number | undefined;
    let failed = "cancelled";
    try {
      for await (const piece of this.engine(name).stream(model, messages, options)) {
        first ??= performance.now();
        if (piece.text) pieces += 1;
        yield piece;
      }
      failed = "";
    } catch (error) {
      failed = error instanceof EngineError ? error.code : "error";
      throw error;
    } finally {
      const ttft = first === undefined ? null : first - begun;
      this.parts.ran?.({ engine: name, model, pieces, ttft_ms: ttft, total_ms: performance.now() - begun, failed });
    }
  }

  private engine(name: string): Engine {
    const engine = this.parts.engines.get(name);
    if (engine === undefined) {
      const known = [...this.parts.engines.keys()].join(", ");
      throw new EngineError(`there is no engine ${name}; known: ${known}`, "unknown_engine");
    }
    return engine;
  }
}
