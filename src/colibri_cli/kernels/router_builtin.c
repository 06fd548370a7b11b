/* The built-in bundle's router, which gen-router made a constant table of when the package was built. */
#include "kernels.h"

#include "router_table.h"

const clb_router_table clb_builtin_router = {
    &colibri_router_table[0][0],
    sizeof colibri_router_table / sizeof *colibri_router_table,
    sizeof *colibri_router_table / sizeof **colibri_router_table,
};
