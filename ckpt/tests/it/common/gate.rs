//! A store whose writers can be blocked or made to fail.

use std::sync::{Arc, Condvar, Mutex};

use storage::testing::fault_store::HookLayer;
use storage::{Key, Result, Storage};

/// What a [`Gate`] does with new objects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Open,
    /// Creating an object blocks.
    Shut,
    /// Creating an object fails.
    Broken,
    /// Creating a tensor file fails for lack of space.
    Full,
    /// Creating a tensor file panics.
    Panics,
}

/// A store that blocks writers until it is opened.
#[derive(Clone)]
pub struct Gate {
    store: Arc<dyn Storage>,
    way: Arc<(Mutex<Way>, Condvar)>,
}

impl Gate {
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        let way = Arc::new((Mutex::new(Way::Open), Condvar::new()));
        let at_gate = Arc::clone(&way);
        let store =
            HookLayer::new(
                inner,
                move |_, call, key| {
                    if call == "create" { pass(&at_gate, key) } else { Ok(()) }
                },
            );
        Gate { store, way }
    }

    pub fn store(&self) -> Arc<dyn Storage> {
        Arc::clone(&self.store)
    }

    pub fn set(&self, way: Way) {
        *self.way.0.lock().unwrap() = way;
        self.way.1.notify_all();
    }
}

fn pass(gate: &(Mutex<Way>, Condvar), key: &Key) -> Result<()> {
    let way = *gate.1.wait_while(gate.0.lock().unwrap(), |way| *way == Way::Shut).unwrap();
    match way {
        Way::Broken => Err(device_error(key)),
        Way::Full if key.as_str().ends_with(".safetensors") => {
            let object = key.as_str().to_owned();
            Err(storage::Error::NoSpace { object, need_bytes: 4096, free_bytes: Some(17) })
        }
        Way::Panics if key.as_str().ends_with(".safetensors") => panic!("device failed"),
        Way::Open | Way::Shut | Way::Full | Way::Panics => Ok(()),
    }
}

/// The error of a failed device.
pub fn device_error(key: &Key) -> storage::Error {
    storage::Error::from_io("reach", key.as_str(), std::io::Error::other("device failed"))
}
