/* The header in C++: prints the version. */

#include <doorbell.h>

#include <iostream>

int main() {
    doorbell_device *device = nullptr;
    if (doorbell_open("soft", &device) != DOORBELL_OK || doorbell_close(device) != DOORBELL_OK) {
        std::cerr << doorbell_last_error() << '\n';
        return 1;
    }
    std::cout << doorbell_version() << '\n';
}
