import assert from "node:assert/strict";
import test from "node:test";

import { Client, EngineError, ModelHandle, type Completion, type Engine, type Ran } from "../src/index.js";

class Saying implements Engine {
  asked: string[] = [];
  constructor(private readonly words: string[], private readonly failsAfter = -1) {}
  async *stream(model: string): AsyncGenerator<Completion> {
    this.asked.push(model);
    for (const [place, text] of this.words.entries()) {
      if (place === this.failsAfter) throw new EngineError("this engine broke", "broke");
      yield { text };
    }
    yield { text: "", finish: "stop" };
  }
}

const handle = (order: string[], engines: Record<string, Engine>, told: Ran[] = []): ModelHandle =>
  new ModelHandle({
    model: () => "m",
    order: () => order,
    engines: new Map(Object.entries(engines)),
    ran: (ran) => told.push(ran),
  });

test("the first engine answers", async () => {
  const told: Ran[] = [];
  assert.equal(await handle(["a", "b"], { a: new Saying(["Hel", "lo"]), b: new Saying(["no"]) }, told).generate("?"), "Hello");
  assert.deepEqual(told.map((ran) => [ran.engine, ran.pieces, ran.failed]), [["a", 2, ""]]);
});

test("an engine that fails before its first piece lets the next one try", async () => {
  assert.equal(await handle(["a", "b"], { a: new Saying(["x"], 0), b: new Saying(["yes"]) }).generate("?"), "yes");
});

test("a later failure is not hidden", async () => {
  const one = handle(["a", "b"], { a: new Saying(["x", "y"], 1), b: new Saying(["yes"]) });
  await assert.rejects(one.generate("?"), /broke/);
});

test("a reader that leaves ends the answer", async () => {
  const told: Ran[] = [];
  for await (const _ of handle(["a"], { a: new Saying(["x", "y"]) }, told).stream([{ role: "user", content: "?" }])) break;
  assert.deepEqual(told.map((ran) => ran.failed), ["cancelled"]);
});

test("engines and models are named or it is said at once", async () => {
  const client = new Client({ agent: null, channel: false, engines: { mine: new Saying(["x"]) } });
  assert.throws(() => client.model("m", "yours"), /mine/);
  assert.throws(() => client.model().model, /no model is named/);
  assert.throws(() => new Client({ agent: null }), /no engine/);
  await client.close();
});
