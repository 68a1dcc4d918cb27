package io.github.midstream.host

import android.app.Notification
import android.app.NotificationChannel
import android.app.NotificationManager
import android.app.Service
import android.content.Context
import android.content.Intent
import android.content.pm.ServiceInfo
import android.os.Build
import android.os.IBinder
import android.util.Log
import com.chaquo.python.PyException
import com.chaquo.python.Python
import java.io.File
import java.util.concurrent.Executors

/**
 * Keeps the agent alive while nobody looks. Every call into Python blocks, so that one worker thread makes them all,
 * in order; Android's main thread makes none. The worker is the process's, not the service's: a service that is made
 * while the one before it still ends waits for that end.
 */
class AgentService : Service() {
    private lateinit var bridge: PhoneBridge

    override fun onBind(intent: Intent?): IBinder? = null

    override fun onCreate() {
        super.onCreate()
        bridge = PhoneBridge(this)
    }

    override fun onStartCommand(intent: Intent?, flags: Int, startId: Int): Int {
        show("starting")
        val token = intent?.getStringExtra(JOIN_TOKEN) ?: ""
        when (intent?.action) {
            PAUSE -> later { host().callAttr("pause") }
            RESUME -> later { host().callAttr("resume") }
            else -> later {
                val url = host().callAttr("start", bridge, folder("state"), folder("models"), token)
                show("serving $url")
            }
        }
        return START_STICKY
    }

    override fun onDestroy() {
        later {
            try {
                host().callAttr("stop")
            } finally {
                bridge.close()
            }
        }
        super.onDestroy()
    }

    private fun host() = Python.getInstance().getModule("midstream_host.service")

    /** What Python raises is a sentence with its next step: shown, not thrown into a thread that nobody watches. */
    private fun later(work: () -> Unit) = worker.execute {
        try {
            work()
        } catch (error: PyException) {
            Log.e(TAG, "the agent", error)
            show(error.message ?: "the agent failed; see the log")
        }
    }

    private fun folder(name: String) = File(noBackupFilesDir, name).apply { mkdirs() }.path

    private fun show(text: String) {
        val manager = getSystemService(Context.NOTIFICATION_SERVICE) as NotificationManager
        manager.createNotificationChannel(NotificationChannel(CHANNEL, "Agent", NotificationManager.IMPORTANCE_LOW))
        val shown = Notification.Builder(this, CHANNEL)
            .setContentTitle("midstream")
            .setContentText(text)
            .setSmallIcon(android.R.drawable.stat_sys_data_bluetooth)
            .setOngoing(true)
            .build()
        if (Build.VERSION.SDK_INT >= Build.VERSION_CODES.UPSIDE_DOWN_CAKE) {
            startForeground(NUMBER, shown, ServiceInfo.FOREGROUND_SERVICE_TYPE_SPECIAL_USE)
        } else {
            startForeground(NUMBER, shown)
        }
    }

    companion object {
        const val PAUSE = "io.github.midstream.host.PAUSE"
        const val RESUME = "io.github.midstream.host.RESUME"
        const val JOIN_TOKEN = "join_token"
        private const val CHANNEL = "agent"
        private const val NUMBER = 1
        private const val TAG = "midstream"
        private val worker = Executors.newSingleThreadExecutor()
    }
}
