//! A settings file and a variable: any text is settings or an error with a message, and settings read back what they show.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starverbs_settings::{KEYS, Settings};

fuzz_target!(|input: (String, String, String)| {
    let (key, value, toml) = input;
    let env = std::iter::once((format!("STARVERBS_{key}"), value));
    match Settings::from_sources(env, Some(&toml)) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(settings) => {
            for key in KEYS.iter().filter(|key| !matches!(key.name, "PCAP" | "CONFIG")) {
                let shown = key.show(&settings);
                let again = Settings::from_sources(std::iter::once((key.variable(), shown.clone())), None);
                let again = again.expect("a shown value is a good value");
                assert_eq!(key.show(&again), shown);
            }
        }
    }
});
