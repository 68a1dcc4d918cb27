/** Against a running gateway; tests/route/test_sdk_typescript.py starts one and sets MIDSTREAM_URL. */

import assert from "node:assert/strict";
import test from "node:test";

import { Client, type Completion, type Engine } from "../src/index.js";

const url = process.env["MIDSTREAM_URL"];

class Counting implements Engine {
  loads = new Set<string>();
  async *stream(model: string): AsyncGenerator<Completion> {
    this.loads.add(model);
    yield { text: "own answer", finish: "stop" };
  }
}

test("an app is told its route and model, warms, and loses no result over a restart", { skip: !url || !!process.env["MIDSTREAM_MODEL"] }, async () => {
  const own = new Counting();
  const client = new Client({ agent: null, gateway: url!, engines: { device: own }, session: "c".repeat(32), device: "node" });
  const channel = client.channel!;
  await channel.connected();
  for (let tries = 0; tries < 500 && client.order[0] !== "device"; tries++) await new Promise((r) => setTimeout(r, 10));
  assert.equal(client.order[0], "device");
  assert.equal(await client.model().generate("?"), "own answer");
  for (let part = 0; part < 100; part++) {
    channel.report("stream", "part", { part });
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  await channel.settled(20_000);
  assert.ok(channel.connections >= 2, `${channel.connections} connections`);
  assert.deepEqual([...own.loads], ["m"]);
  await client.close();
});

test("answers of a gateway come in pieces", { skip: !process.env["MIDSTREAM_MODEL"] }, async () => {
  const client = new Client({ agent: url!, channel: false });
  const pieces: string[] = [];
  const messages = [{ role: "user", content: "Say hello." }];
  for await (const piece of client.model(process.env["MIDSTREAM_MODEL"]!).stream(messages, { max_tokens: 8 })) {
    pieces.push(piece.text);
  }
  assert.ok(pieces.join("").length > 0 && pieces.length > 1);
  await assert.rejects(client.model("no-such-model").generate("?"), /no model/);
  await client.close();
});
