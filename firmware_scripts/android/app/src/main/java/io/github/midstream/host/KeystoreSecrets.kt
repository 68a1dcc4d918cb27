package io.github.midstream.host

import android.content.Context
import android.security.keystore.KeyGenParameterSpec
import android.security.keystore.KeyProperties
import android.util.Base64
import java.io.File
import java.security.KeyStore
import javax.crypto.Cipher
import javax.crypto.KeyGenerator
import javax.crypto.SecretKey
import javax.crypto.spec.GCMParameterSpec

/**
 * Secrets in files that only a key in the phone's Keystore can read. The agent's own key is an Ed25519 key that Python's
 * TLS must hold, so it cannot live inside the Keystore itself; at rest it is sealed by one that does.
 */
class KeystoreSecrets(context: Context) {
    private val folder = File(context.noBackupFilesDir, "secrets").apply { mkdirs() }

    @Synchronized
    fun read(name: String): String? {
        val sealed = file(name).takeIf(File::exists)?.readBytes() ?: return null
        val cipher = Cipher.getInstance(FORM)
        cipher.init(Cipher.DECRYPT_MODE, key(), GCMParameterSpec(TAG_BITS, sealed, 0, NONCE_BYTES))
        val secret = cipher.doFinal(sealed, NONCE_BYTES, sealed.size - NONCE_BYTES)
        return Base64.encodeToString(secret, Base64.NO_WRAP)
    }

    @Synchronized
    fun write(name: String, base64: String) {
        val cipher = Cipher.getInstance(FORM)
        cipher.init(Cipher.ENCRYPT_MODE, key())
        val sealed = cipher.iv + cipher.doFinal(Base64.decode(base64, Base64.NO_WRAP))
        val fresh = File(folder, file(name).name + ".new")
        fresh.outputStream().use {
            it.write(sealed)
            it.fd.sync()
        }
        check(fresh.renameTo(file(name))) { "cannot replace ${file(name).name}" }
    }

    private fun file(name: String) = File(folder, name.filter { it.isLetterOrDigit() || it == '.' || it == '-' })

    private fun key(): SecretKey {
        val store = KeyStore.getInstance(STORE).apply { load(null) }
        (store.getKey(ALIAS, null) as? SecretKey)?.let { return it }
        val wanted = KeyGenParameterSpec.Builder(ALIAS, KeyProperties.PURPOSE_ENCRYPT or KeyProperties.PURPOSE_DECRYPT)
            .setBlockModes(KeyProperties.BLOCK_MODE_GCM)
            .setEncryptionPaddings(KeyProperties.ENCRYPTION_PADDING_NONE)
            .build()
        return KeyGenerator.getInstance(KeyProperties.KEY_ALGORITHM_AES, STORE).run {
            init(wanted)
            generateKey()
        }
    }

    private companion object {
        const val STORE = "AndroidKeyStore"
        const val ALIAS = "midstream"
        const val FORM = "AES/GCM/NoPadding"
        const val NONCE_BYTES = 12
        const val TAG_BITS = 128
    }
}
