package io.github.midstream.host

import android.content.BroadcastReceiver
import android.content.Context
import android.content.Intent
import android.content.IntentFilter
import android.net.ConnectivityManager
import android.net.Network
import android.net.NetworkCapabilities
import android.net.wifi.WifiManager
import android.os.BatteryManager
import android.os.Build
import android.os.PowerManager
import com.chaquo.python.PyObject
import org.json.JSONObject
import java.util.concurrent.Executors

/**
 * What the agent cannot know or do by itself; `midstream_host/bridge.py` calls these methods by name, from threads of
 * its own. Documents cross as JSON: fewer types to convert, and a missing field is a default there.
 */
class PhoneBridge(private val context: Context) {
    private val power = context.getSystemService(Context.POWER_SERVICE) as PowerManager
    private val battery = context.getSystemService(Context.BATTERY_SERVICE) as BatteryManager
    private val networks = context.getSystemService(Context.CONNECTIVITY_SERVICE) as ConnectivityManager
    private val wifi = context.applicationContext.getSystemService(Context.WIFI_SERVICE) as WifiManager
    private val awake = power.newWakeLock(PowerManager.PARTIAL_WAKE_LOCK, "midstream:agent")
        .apply { setReferenceCounted(false) }
    private val multicast = wifi.createMulticastLock("midstream").apply { setReferenceCounted(false) }
    private val secrets = KeystoreSecrets(context)
    private val finder = ServiceFinder(context)
    private val models = LiteRtModels()
    private val telling = Executors.newSingleThreadExecutor()

    @Volatile private var listener: PyObject? = null

    private val changes = object : BroadcastReceiver() {
        override fun onReceive(context: Context, intent: Intent) = tell()
    }
    private val networkChanges = object : ConnectivityManager.NetworkCallback() {
        override fun onCapabilitiesChanged(network: Network, capabilities: NetworkCapabilities) = tell()
        override fun onLost(network: Network) = tell()
    }
    private val heat = if (Build.VERSION.SDK_INT >= 29) PowerManager.OnThermalStatusChangedListener { tell() } else null

    init {
        val wanted = IntentFilter().apply {
            addAction(PowerManager.ACTION_DEVICE_IDLE_MODE_CHANGED)
            addAction(PowerManager.ACTION_POWER_SAVE_MODE_CHANGED)
            addAction(Intent.ACTION_POWER_CONNECTED)
            addAction(Intent.ACTION_POWER_DISCONNECTED)
            addAction(Intent.ACTION_SCREEN_ON)
            addAction(Intent.ACTION_SCREEN_OFF)
        }
        context.registerReceiver(changes, wanted)
        networks.registerDefaultNetworkCallback(networkChanges)
        if (Build.VERSION.SDK_INT >= 29) heat?.let { power.addThermalStatusListener(telling, it) }
    }

    fun close() {
        listener = null
        context.unregisterReceiver(changes)
        networks.unregisterNetworkCallback(networkChanges)
        if (Build.VERSION.SDK_INT >= 29) heat?.let(power::removeThermalStatusListener)
        holdAwake(false)
        holdMulticast(false)
        models.closeAll()
        telling.shutdown()
    }

    /** The fields of `HostState`. */
    fun stateJson(): String {
        val here = networks.getNetworkCapabilities(networks.activeNetwork)
        val exempt = power.isIgnoringBatteryOptimizations(context.packageName)
        return JSONObject()
            .put("battery_ratio", battery.getIntProperty(BatteryManager.BATTERY_PROPERTY_CAPACITY) / 100.0)
            .put("charging", battery.isCharging)
            .put("power_save", power.isPowerSaveMode)
            .put("thermal", thermal())
            .put("network", transport(here))
            .put("validated", here?.hasCapability(NetworkCapabilities.NET_CAPABILITY_VALIDATED) ?: false)
            .put("metered", networks.isActiveNetworkMetered)
            .put("background", !power.isInteractive)
            .put("idle", power.isDeviceIdleMode && !exempt)
            .toString()
    }

    /** `callback` is called without arguments from a thread of ours; null ends it. */
    fun onChange(callback: PyObject?) {
        listener = callback
    }

    /** With a bound: a lock that a bug forgot must not drain a battery. */
    fun holdAwake(on: Boolean) {
        if (on) awake.acquire(AWAKE_MS) else if (awake.isHeld) awake.release()
    }

    fun holdMulticast(on: Boolean) {
        if (on) multicast.acquire() else if (multicast.isHeld) multicast.release()
    }

    fun browseJson(type: String, seconds: Double): String = finder.browse(type, seconds)

    /** Base64, or null when nothing is kept under this name. */
    fun readSecret(name: String): String? = secrets.read(name)

    fun writeSecret(name: String, base64: String) = secrets.write(name, base64)

    fun runtimeVersion(): String = models.version()

    fun loadModel(path: String, threads: Int): Long = models.load(path, threads)

    fun modelJson(handle: Long): String = models.describe(handle)

    fun runModel(handle: Long, inputs: Array<ByteArray>, shapesJson: String): Array<ByteArray> =
        models.run(handle, inputs, shapesJson)

    fun closeModel(handle: Long) = models.close(handle)

    private fun tell() {
        val called = listener ?: return
        if (!telling.isShutdown) telling.execute { called.call() }
    }

    private fun thermal(): String {
        if (Build.VERSION.SDK_INT < 29) return "none"
        return when (power.currentThermalStatus) {
            PowerManager.THERMAL_STATUS_LIGHT -> "light"
            PowerManager.THERMAL_STATUS_MODERATE -> "moderate"
            PowerManager.THERMAL_STATUS_SEVERE -> "severe"
            PowerManager.THERMAL_STATUS_CRITICAL -> "critical"
            PowerManager.THERMAL_STATUS_EMERGENCY -> "emergency"
            PowerManager.THERMAL_STATUS_SHUTDOWN -> "shutdown"
            else -> "none"
        }
    }

    private fun transport(here: NetworkCapabilities?): String = when {
        here == null -> "none"
        here.hasTransport(NetworkCapabilities.TRANSPORT_WIFI) -> "wifi"
        here.hasTransport(NetworkCapabilities.TRANSPORT_ETHERNET) -> "ethernet"
        here.hasTransport(NetworkCapabilities.TRANSPORT_CELLULAR) -> "cellular"
        here.hasTransport(NetworkCapabilities.TRANSPORT_VPN) -> "vpn"
        else -> "other"
    }

    private companion object {
        const val AWAKE_MS = 10 * 60 * 1000L
    }
}
