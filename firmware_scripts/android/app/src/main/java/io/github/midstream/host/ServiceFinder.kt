package io.github.midstream.host

import android.content.Context
import android.net.nsd.NsdManager
import android.net.nsd.NsdServiceInfo
import org.json.JSONArray
import org.json.JSONObject
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit

/**
 * Service discovery by the system. Some phones drop inbound multicast for apps even under the multicast lock, and only
 * the system's own NsdManager hears the answers (kyujin-cho/Bada#99).
 */
class ServiceFinder(context: Context) {
    private val manager = context.getSystemService(Context.NSD_SERVICE) as NsdManager

    /** Blocks for `seconds`. A JSON list of {instance, addresses, port, txt}. */
    @Suppress("DEPRECATION") // resolveService and host: their successors need Android 14
    fun browse(type: String, seconds: Double): String {
        val found = LinkedBlockingQueue<NsdServiceInfo>(MOST)
        val listener = object : NsdManager.DiscoveryListener {
            override fun onServiceFound(info: NsdServiceInfo) { found.offer(info) }
            override fun onServiceLost(info: NsdServiceInfo) = Unit
            override fun onDiscoveryStarted(type: String) = Unit
            override fun onDiscoveryStopped(type: String) = Unit
            override fun onStartDiscoveryFailed(type: String, code: Int) = Unit
            override fun onStopDiscoveryFailed(type: String, code: Int) = Unit
        }
        val end = System.nanoTime() + (seconds * 1e9).toLong()
        val listed = JSONArray()
        manager.discoverServices(type, NsdManager.PROTOCOL_DNS_SD, listener)
        try {
            // One after the other: NsdManager resolves one service at a time.
            while (listed.length() < MOST) {
                val info = found.poll(end - System.nanoTime(), TimeUnit.NANOSECONDS) ?: break
                resolve(info, end)?.let(listed::put)
            }
        } finally {
            manager.stopServiceDiscovery(listener)
        }
        return listed.toString()
    }

    @Suppress("DEPRECATION")
    private fun resolve(info: NsdServiceInfo, end: Long): JSONObject? {
        val answer = LinkedBlockingQueue<List<NsdServiceInfo>>(1)
        manager.resolveService(info, object : NsdManager.ResolveListener {
            override fun onServiceResolved(resolved: NsdServiceInfo) { answer.offer(listOf(resolved)) }
            override fun onResolveFailed(info: NsdServiceInfo, code: Int) { answer.offer(emptyList()) }
        })
        val resolved = answer.poll(end - System.nanoTime(), TimeUnit.NANOSECONDS)?.firstOrNull() ?: return null
        val texts = JSONObject()
        resolved.attributes.forEach { (name, value) -> texts.put(name, value?.let { String(it) } ?: "") }
        return JSONObject()
            .put("instance", resolved.serviceName)
            .put("addresses", JSONArray(listOfNotNull(resolved.host?.hostAddress)))
            .put("port", resolved.port)
            .put("txt", texts)
    }

    private companion object {
        const val MOST = 16
    }
}
