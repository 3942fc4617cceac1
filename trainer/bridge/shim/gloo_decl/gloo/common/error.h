// Nothing of this header is used by the process group that libtorch declares.
#pragma once
