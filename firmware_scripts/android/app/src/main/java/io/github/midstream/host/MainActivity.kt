package io.github.midstream.host

import android.Manifest
import android.annotation.SuppressLint
import android.app.Activity
import android.content.Intent
import android.net.Uri
import android.os.Build
import android.os.Bundle
import android.os.PowerManager
import android.provider.Settings
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.TextView

/** A field for the join string and a button. Starting from a visible activity is what Android always allows. */
class MainActivity : Activity() {
    override fun onCreate(saved: Bundle?) {
        super.onCreate(saved)
        val token = EditText(this).apply { hint = "join string of `midstream coordinator` (once)" }
        val told = TextView(this)
        val start = Button(this).apply {
            text = "Start"
            setOnClickListener { told.text = begin(token.text.toString().trim()) }
        }
        setContentView(LinearLayout(this).apply {
            orientation = LinearLayout.VERTICAL
            listOf(token, start, told).forEach(::addView)
        })
        if (Build.VERSION.SDK_INT >= Build.VERSION_CODES.TIRAMISU) {
            requestPermissions(arrayOf(Manifest.permission.POST_NOTIFICATIONS), 0)
        }
        askForExemption()
    }

    /** Android 12 and later refuse some starts: say so instead of dying of it (binwiederhier/ntfy#1709). */
    private fun begin(token: String): String = try {
        startForegroundService(Intent(this, AgentService::class.java).putExtra(AgentService.JOIN_TOKEN, token))
        "started"
    } catch (error: IllegalStateException) {
        "Android refuses to start the service now: open this app, or exempt it from battery optimisation ($error)"
    }

    /** Without the exemption the agent sleeps in Doze; it says so to its fleet and comes back by itself. */
    @SuppressLint("BatteryLife")
    private fun askForExemption() {
        val power = getSystemService(POWER_SERVICE) as PowerManager
        if (!power.isIgnoringBatteryOptimizations(packageName)) {
            val ask = Intent(Settings.ACTION_REQUEST_IGNORE_BATTERY_OPTIMIZATIONS, Uri.parse("package:$packageName"))
            startActivity(ask)
        }
    }
}
