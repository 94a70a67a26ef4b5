// The kernel as a library: the fake driver's launches.
#include "cuda_shim.h"
extern "C" void launch(unsigned blocks, const unsigned long long* arguments) { run(blocks, arguments); }
