/** The SDK's entrance: engines by name, models by name, and the gateway's say in which of them `auto` means. */

import { Channel, type Instruction } from "./channel.js";
import { EngineError, HttpEngine, type Engine } from "./engines.js";
import { ModelHandle, type Ran } from "./handle.js";

export interface ClientOptions {
  /** Base URL of the agent on this device; null where there is none. */
  agent?: string | null;
  /** Base URL of a gateway in the cloud: the engine `cloud`. The control channel leads to it, else to the agent. */
  gateway?: string;
  key?: string;
  /** Further engines by name, or others for `device` and `cloud`. */
  engines?: Record<string, Engine>;
  /** Names as `auto` tries them; the gateway's route puts its target first. */
  order?: string[];
  /** Model where none is named, until the gateway switches it. */
  model?: string;
  /** Whether to hold the control channel. */
  channel?: boolean;
  device?: string;
  session?: string;
}

const AGENT_URL = "http://127.0.0.1:8790";
const AUTO = "auto";
const EDGE_NAMES = new Set(["device", "edge", "local"]);

export class Client {
  readonly engines = new Map<string, Engine>();
  readonly channel: Channel | undefined;
  order: string[];
  private model_: string;
  private readonly named = new Set<string>();

  constructor(options: ClientOptions = {}) {
    const agent = options.agent === undefined ? AGENT_URL : options.agent;
    if (agent !== null) this.engines.set("device", new HttpEngine(agent));
    if (options.gateway) this.engines.set("cloud", new HttpEngine(options.gateway, options.key));
    for (const [name, engine] of Object.entries(options.engines ?? {})) this.engines.set(name, engine);
    if (this.engines.size === 0) throw new EngineError("there is no engine: give agent, gateway or engines", "no_engine");
    this.order = options.order ?? [...this.engines.keys()];
    this.model_ = options.model ?? "";
    const url = options.gateway ?? agent;
    if (options.channel !== false && url) {
      this.channel = new Channel({
        url,
        ...(options.gateway && options.key ? { key: options.key } : {}),
        ...(options.device ? { device: options.device } : {}),
        ...(options.session ? { session: options.session } : {}),
        obey: (order) => this.obey(order),
        about: () => ({ engines: [...this.engines.keys()].slice(0, 32), models: this.models() }),
      });
    }
  }

  /** A handle. name: empty follows the gateway's choice; engine: a name, or `auto`. */
  model(name = "", engine = AUTO): ModelHandle {
    if (engine !== AUTO && !this.engines.has(engine)) throw this.unknown(engine);
    if (name) this.named.add(name);
    return new ModelHandle({
      model: () => name || this.chosen(),
      order: () => (engine === AUTO ? this.order : [engine]),
      engines: this.engines,
      ran: (ran) => this.tell(ran),
    });
  }

  async close(): Promise<void> {
    await this.channel?.close();
    for (const engine of this.engines.values()) await engine.close?.();
  }

  private chosen(): string {
    if (!this.model_) throw new EngineError("no model is named and the gateway has chosen none", "no_model");
    return this.model_;
  }

  private models(): string[] {
    return [...new Set([...this.named, ...(this.model_ ? [this.model_] : [])])].sort().slice(0, 32);
  }

  private async obey(order: Instruction): Promise<Record<string, unknown>> {
    if (order.do === "route") {
      const name = this.engineName(order.target);
      this.order = [name, ...this.order.filter((other) => other !== name)];
      return { order: this.order };
    }
    if (order.do === "switch") {
      const changed = this.model_ !== order.model;
      this.model_ = order.model;
      return { model: order.model, changed };
    }
    if (order.do === "warm") {
      const name = order.target ? this.engineName(order.target) : this.order[0] ?? "";
      return { ...(await this.model(order.model, name).warm()) };
    }
    throw new EngineError(`this SDK does not know ${String(order.do)}; update it`, "unknown_instruction");
  }

  private engineName(target: string): string {
    if (this.engines.has(target)) return target;
    if (EDGE_NAMES.has(target) && this.engines.has("device")) return "device";
    throw this.unknown(target);
  }

  private unknown(name: string): EngineError {
    return new EngineError(`there is no engine ${name}; known: ${[...this.engines.keys()].join(", ")}`, "unknown_engine");
  }

  private tell(ran: Ran): void {
    try {
      this.channel?.report(ran.model, "answer", { ...ran });
    } catch {
      // A full outbox must not fail the app's own request.
    }
  }
}
