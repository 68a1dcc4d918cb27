plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
    id("com.chaquo.python")
}

// The rooms of midstream that run on a device; the coordinator's stays out.
val rooms = listOf("agent", "engines", "gateway", "links", "netprobe", "profiles", "protocol", "split_models")
val repository = rootDir.resolve("../..")
val roomSources = layout.buildDirectory.dir("midstream")

val copyRooms by tasks.registering(Sync::class) {
    from(repository) {
        rooms.forEach { include("$it/**/*.py", "$it/**/*.toml", "$it/**/*.json") }
    }
    into(roomSources)
}

android {
    namespace = "io.github.midstream.host"
    compileSdk = 35
    defaultConfig {
        applicationId = "io.github.midstream.host"
        minSdk = 26
        targetSdk = 35
        versionCode = 1
        versionName = "0.1.0"
        // Python 3.13 has no 32-bit Android.
        ndk { abiFilters += listOf("arm64-v8a", "x86_64") }
    }
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
    kotlinOptions { jvmTarget = "17" }
    androidResources { noCompress += "tflite" }
}

chaquopy {
    defaultConfig {
        version = "3.13"
        pip {
            // What midstream needs on Android; everything else it does without.
            install("aiohttp>=3.12")
            install("attrs>=24.2")
            install("paho-mqtt>=2.1")
        }
        // The catalogue of models is read from a file beside its module.
        extractPackages("engines")
    }
    sourceSets {
        getByName("main") { srcDir(roomSources) }
    }
}

tasks.matching { it.name.matches(Regex("(merge|generate).*PythonSources")) }.configureEach { dependsOn(copyRooms) }

dependencies {
    implementation("androidx.core:core-ktx:1.16.0")
    implementation("com.google.ai.edge.litert:litert:1.4.0")
}
