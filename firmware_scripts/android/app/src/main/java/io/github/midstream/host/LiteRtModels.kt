package io.github.midstream.host

import org.json.JSONArray
import org.json.JSONObject
import org.tensorflow.lite.DataType
import org.tensorflow.lite.Interpreter
import org.tensorflow.lite.Tensor
import org.tensorflow.lite.TensorFlowLite
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.ConcurrentHashMap
import java.util.concurrent.atomic.AtomicLong

/** Models on LiteRT, by number. The agent runs one model in one thread at a time. */
class LiteRtModels {
    private val open = ConcurrentHashMap<Long, Interpreter>()
    private val numbers = AtomicLong()

    fun version(): String = TensorFlowLite.runtimeVersion()

    fun load(path: String, threads: Int): Long {
        val made = Interpreter(File(path), Interpreter.Options().setNumThreads(threads))
        made.allocateTensors()
        return numbers.incrementAndGet().also { open[it] = made }
    }

    /** {"inputs": [{name, datatype, shape}], "outputs": [...]}; -1 in a shape is a free dimension. */
    fun describe(handle: Long): String {
        val model = model(handle)
        val inputs = (0 until model.inputTensorCount).map { described(model.getInputTensor(it)) }
        val outputs = (0 until model.outputTensorCount).map { described(model.getOutputTensor(it)) }
        return JSONObject().put("inputs", JSONArray(inputs)).put("outputs", JSONArray(outputs)).toString()
    }

    /** Little-endian, row-major bytes in the model's order; `shapesJson` is a list of the inputs' shapes. */
    fun run(handle: Long, inputs: Array<ByteArray>, shapesJson: String): Array<ByteArray> {
        val model = model(handle)
        val shapes = JSONArray(shapesJson)
        for (at in inputs.indices) {
            val shape = shapes.getJSONArray(at).let { s -> IntArray(s.length()) { s.getInt(it) } }
            if (!model.getInputTensor(at).shape().contentEquals(shape)) model.resizeInput(at, shape)
        }
        model.allocateTensors()
        val given = Array<Any>(inputs.size) { direct(inputs[it].size).put(inputs[it]).rewind() }
        val taken = (0 until model.outputTensorCount).associateWith { direct(model.getOutputTensor(it).numBytes()) }
        model.runForMultipleInputsOutputs(given, taken.toMap<Int, Any>())
        return Array(taken.size) { at ->
            taken.getValue(at).run { rewind(); ByteArray(remaining()).also(::get) }
        }
    }

    fun close(handle: Long) {
        open.remove(handle)?.close()
    }

    fun closeAll() = open.keys.toList().forEach(::close)

    private fun model(handle: Long) = checkNotNull(open[handle]) { "this model was closed" }

    private fun direct(bytes: Int) = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder())

    private fun described(tensor: Tensor) = JSONObject()
        .put("name", tensor.name())
        .put("datatype", datatype(tensor.dataType()))
        .put("shape", JSONArray(tensor.shapeSignature().toList()))

    private fun datatype(type: DataType) = when (type) {
        DataType.FLOAT32 -> "FP32"
        DataType.INT32 -> "INT32"
        DataType.INT64 -> "INT64"
        DataType.UINT8 -> "UINT8"
        DataType.INT8 -> "INT8"
        DataType.INT16 -> "INT16"
        DataType.BOOL -> "BOOL"
        else -> error("tensors of type $type cannot be carried")
    }
}
