export { Client, type ClientOptions } from "./client.js";
export { Channel, type Instruction } from "./channel.js";
export { EngineError, HttpEngine, type Completion, type Engine, type Message, type Options } from "./engines.js";
export { ModelHandle, type Ran, type Warmth } from "./handle.js";
