//! Statuses, their names and texts.

use super::*;
use std::ffi::CStr;

fn text() -> String {
    // SAFETY: the text is there until the next failure.
    unsafe { CStr::from_ptr(netmem_error_text()) }.to_string_lossy().into_owned()
}

#[test]
fn a_panic_is_a_status_with_its_text() {
    assert_eq!(status(|| panic!("out of {}", "luck")), netmem_status::NETMEM_ERR_PANIC);
    assert_eq!(text(), "the library panicked: out of luck");
}

#[test]
fn the_text_is_of_the_thread() {
    status(|| Err(Failure::Null("pool")));
    assert_eq!(std::thread::spawn(text).join().expect("no panic"), "");
    assert_eq!(text(), "pool is null");
}

#[test]
fn statuses_of_opening_name_the_cause() {
    use netmem_status::*;
    let source = io::Error::from_raw_os_error(12);
    let no_memory = RegionError::System { step: "map", bytes: 4096, kind: "pages", source };
    let interface = |code| OpenError::Interface { name: "x".into(), source: io::Error::from_raw_os_error(code) };
    for (error, expected) in [
        (OpenError::Connect(ConnectError::Driver(NetError::Region(no_memory))), NETMEM_ERR_NO_MEMORY),
        (OpenError::Net(NetError::Pool(PoolError::NoPages)), NETMEM_ERR_NO_PAGES),
        (OpenError::Net(NetError::NoTxPages), NETMEM_ERR_SYSTEM),
        (interface(19), NETMEM_ERR_NOT_FOUND),
        (interface(13), NETMEM_ERR_SYSTEM),
    ] {
        assert_eq!(open(&error), expected, "{error:?}");
    }
}

#[test]
fn each_status_has_its_name() {
    use netmem_status::*;
    let all = [
        NETMEM_OK,
        NETMEM_ERR_NULL,
        NETMEM_ERR_STRUCT_SIZE,
        NETMEM_ERR_ARGUMENT,
        NETMEM_ERR_HANDLE,
        NETMEM_ERR_THREAD,
        NETMEM_ERR_NO_MEMORY,
        NETMEM_ERR_NO_PAGES,
        NETMEM_ERR_SHARED,
        NETMEM_ERR_RANGE,
        NETMEM_ERR_SYSTEM,
        NETMEM_ERR_CLOSED,
        NETMEM_ERR_STATE,
        NETMEM_ERR_PANIC,
        NETMEM_ERR_STOPPED,
        NETMEM_ERR_UNSENDABLE,
        NETMEM_ERR_PRIVILEGE,
        NETMEM_ERR_BUSY,
        NETMEM_ERR_NOT_FOUND,
        NETMEM_ERR_UNSUPPORTED,
        NETMEM_ERR_END,
        NETMEM_ERR_REFUSED,
        NETMEM_ERR_RESET,
        NETMEM_ERR_TIMED_OUT,
        NETMEM_ERR_UNREACHABLE,
        NETMEM_ERR_SHUT_DOWN,
        NETMEM_ERR_IN_USE,
        NETMEM_ERR_TOO_MANY,
        NETMEM_ERR_UNVERIFIED,
    ];
    for value in 0..=255 {
        // SAFETY: the name is static.
        let name = unsafe { CStr::from_ptr(netmem_status_name(value)) }.to_string_lossy();
        let status = all.iter().find(|&&status| status as i32 == value);
        let expected = status.map_or("unknown status".to_owned(), |status| format!("{status:?}"));
        assert_eq!(name, expected, "{value}");
    }
    assert_eq!(NETMEM_ERR_PANIC as i32, 13);
}
