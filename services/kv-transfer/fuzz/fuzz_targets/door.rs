#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kv_transfer::fuzzing::door(bytes));
