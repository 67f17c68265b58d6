//! Exports the unsupported functions of the driver API: each returns NOT_SUPPORTED.
//!
//! The first call of each function in a process image is logged, so that a program that needs one
//! is found.

use crate::abi::Code;
use std::sync::Once;

/// Logs the function's first call.
fn answer(name: &'static str, once: &Once) -> i32 {
    once.call_once(|| {
        if let Ok(process) = crate::process::process() {
            process.sim.log(&format!("{name} is not supported"));
        }
    });
    Code::NOT_SUPPORTED.0
}

/// Declares C functions that ignore their arguments.
macro_rules! unsupported {
    ($($name:ident,)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the CUDA driver API: NOT_SUPPORTED.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> i32 {
                static ONCE: Once = Once::new();
                let body = || Err(Code(answer(stringify!($name), &ONCE)));
                $crate::entry::call(stringify!($name), body)
            }
        )*
        pub(crate) static EXPORTS: &[$crate::entry::Export] = &[
            $($crate::entry::Export { name: stringify!($name), address: $name as *const std::ffi::c_void },)*
        ];
    };
}

unsupported! {
        cuArrayGetPlane, cuArrayGetSparseProperties,
    cuCoredumpDeregisterCompleteCallback, cuCoredumpDeregisterStartCallback, cuCoredumpGetAttribute,
    cuCoredumpGetAttributeGlobal, cuCoredumpRegisterCompleteCallback, cuCoredumpRegisterStartCallback,
    cuCoredumpSetAttribute, cuCoredumpSetAttributeGlobal, cuCtxFromGreenCtx,
    cuCtxGetDevResource, cuCtxGetDevice_v2, cuCtxGetExecAffinity, cuCtxGetSharedMemConfig, cuCtxRecordEvent,
    cuCtxResetPersistingL2Cache, cuCtxSetSharedMemConfig, cuCtxSynchronize_v2, cuCtxWaitEvent,
    cuDestroyExternalMemory, cuDestroyExternalSemaphore, cuDevResourceGenerateDesc, cuDevSmResourceSplit,
    cuDevSmResourceSplitByCount, cuDeviceGetCliqueCount, cuDeviceGetCliqueInfo, cuDeviceGetDevResource,
    cuDeviceGetExecAffinitySupport, cuDeviceGetFabricClusterUuid,     cuDeviceGetHostAtomicCapabilities, cuDeviceGetLuid, cuDeviceGetP2PAtomicCapabilities,
    cuDeviceGetP2PAttribute, cuDeviceGetProperties, cuDeviceGetTexture1DLinearMaxWidth,     cuDeviceRegisterAsyncNotification, cuDeviceSetGraphMemAttribute, cuDeviceUnregisterAsyncNotification,
    cuExternalMemoryGetMappedBuffer, cuExternalMemoryGetMappedMipmappedArray, cuFlushGPUDirectRDMAWrites,
    cuFuncGetModule, cuFuncGetName, cuFuncGetParamCount, cuFuncGetParamInfo, cuFuncIsLoaded, cuFuncLoad,
    cuFuncSetBlockShape, cuFuncSetSharedMemConfig, cuFuncSetSharedSize, cuGraphAddBatchMemOpNode,
    cuGraphAddDependencies, cuGraphAddDependencies_v2,     cuGraphAddEventRecordNode, cuGraphAddEventWaitNode, cuGraphAddExternalSemaphoresSignalNode,
    cuGraphAddExternalSemaphoresWaitNode, cuGraphAddHostNode, cuGraphAddKernelNode_v2,
    cuGraphAddMemcpyNode, cuGraphAddMemsetNode, cuGraphAddNode,
    cuGraphAddNode_v2, cuGraphAddNode_v3, cuGraphBatchMemOpNodeGetParams, cuGraphBatchMemOpNodeSetParams,
    cuGraphClone, cuGraphConditionalHandleCreate,     cuGraphDebugDotPrint, cuGraphDestroyNode, cuGraphEventRecordNodeGetEvent,
    cuGraphEventRecordNodeSetEvent, cuGraphEventWaitNodeGetEvent, cuGraphEventWaitNodeSetEvent,
    cuGraphExecBatchMemOpNodeSetParams, cuGraphExecChildGraphNodeSetParams,     cuGraphExecEventRecordNodeSetEvent, cuGraphExecEventWaitNodeSetEvent,
    cuGraphExecExternalSemaphoresSignalNodeSetParams, cuGraphExecExternalSemaphoresWaitNodeSetParams,
    cuGraphExecGetFlags, cuGraphExecGetId, cuGraphExecHostNodeSetParams, cuGraphExecKernelNodeSetParams,
    cuGraphExecKernelNodeSetParams_v2, cuGraphExecMemcpyNodeSetParams, cuGraphExecMemsetNodeSetParams,
    cuGraphExecNodeSetParams, cuGraphExecUpdate, cuGraphExecUpdate_v2,
    cuGraphExternalSemaphoresSignalNodeGetParams, cuGraphExternalSemaphoresSignalNodeSetParams,
    cuGraphExternalSemaphoresWaitNodeGetParams, cuGraphExternalSemaphoresWaitNodeSetParams, cuGraphGetEdges,
    cuGraphGetEdges_v2, cuGraphGetId, cuGraphHostNodeGetParams,
    cuGraphHostNodeSetParams,     cuGraphInstantiate_v2, cuGraphKernelNodeCopyAttributes, cuGraphKernelNodeGetAttribute,
    cuGraphKernelNodeGetParams, cuGraphKernelNodeGetParams_v2, cuGraphKernelNodeSetAttribute,
    cuGraphKernelNodeSetParams, cuGraphKernelNodeSetParams_v2,     cuGraphMemFreeNodeGetParams, cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeSetParams,
    cuGraphMemsetNodeGetParams, cuGraphMemsetNodeSetParams, cuGraphNodeFindInClone,
    cuGraphNodeGetContainingGraph, cuGraphNodeGetDependencies, cuGraphNodeGetDependencies_v2,
    cuGraphNodeGetDependentNodes, cuGraphNodeGetDependentNodes_v2, cuGraphNodeGetEnabled,
    cuGraphNodeGetLocalId, cuGraphNodeGetParams, cuGraphNodeGetToolsId,     cuGraphNodeSetEnabled, cuGraphNodeSetParams, cuGraphNodeSetParams_v2, cuGraphReleaseUserObject,
    cuGraphRemoveDependencies, cuGraphRemoveDependencies_v2, cuGraphRetainUserObject,     cuGraphicsMapResources, cuGraphicsResourceGetMappedMipmappedArray, cuGraphicsResourceGetMappedPointer_v2,
    cuGraphicsResourceSetMapFlags_v2, cuGraphicsSubResourceGetMappedArray, cuGraphicsUnmapResources,
    cuGraphicsUnregisterResource, cuGreenCtxGetDevResource,
    cuGreenCtxGetId, cuGreenCtxRecordEvent, cuGreenCtxStreamCreate, cuGreenCtxWaitEvent,
    cuImportExternalMemory, cuImportExternalSemaphore, cuIpcGetEventHandle, cuIpcOpenEventHandle,
    cuKernelGetLibrary, cuKernelGetName, cuKernelGetParamCount,
    cuKernelGetParamInfo, cuKernelSetAttribute, cuKernelSetCacheConfig, cuLaunch,
    cuLaunchCooperativeKernelMultiDevice, cuLaunchGrid, cuLaunchGridAsync, cuLaunchHostFunc,
    cuLaunchHostFunc_v2, cuLibraryGetModule, cuLibraryGetUnifiedFunction,
    cuLibraryLoadFromFile, cuLinkAddData_v2, cuLinkAddFile_v2,
    cuLinkComplete, cuLinkCreate_v2, cuLinkDestroy, cuLogicalEndpointAddDevice, cuLogicalEndpointBindAddr,
    cuLogicalEndpointBindMem, cuLogicalEndpointCreate, cuLogicalEndpointDestroy, cuLogicalEndpointExport,
    cuLogicalEndpointGetLimits, cuLogicalEndpointIdRelease, cuLogicalEndpointIdReserve,
    cuLogicalEndpointImport, cuLogicalEndpointQuery, cuLogicalEndpointUnbind, cuLogsCurrent, cuLogsDumpToFile,
    cuLogsDumpToMemory, cuLogsRegisterCallback, cuLogsUnregisterCallback, cuMemBatchDecompressAsync,
    cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardBatchAsync, cuMemGetLocationInfo,
    cuMemPoolExportPointer, cuMemPoolGetAccess,
    cuMemPoolImportFromShareableHandle, cuMemPoolImportPointer, cuMemPoolSetAccess, cuMemPrefetchBatchAsync,
    cuMemRangeGetAttributes, cuMemcpy2DAsync_v2,
    cuMemcpy2DUnaligned_v2, cuMemcpy2D_v2, cuMemcpy3DAsync_v2, cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_v2,
    cuMemcpy3DPeer, cuMemcpy3DPeerAsync, cuMemcpy3DWithAttributesAsync, cuMemcpy3D_v2, cuMemcpyAtoA_v2,
    cuMemcpyAtoD_v2, cuMemcpyAtoHAsync_v2, cuMemcpyAtoH_v2, cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2,
    cuMemcpyDtoA_v2, cuMemcpyHtoAAsync_v2, cuMemcpyHtoA_v2, cuMemcpyWithAttributesAsync, cuMemsetD2D16Async,
    cuMemsetD2D16_v2, cuMemsetD2D32Async, cuMemsetD2D32_v2, cuMemsetD2D8Async, cuMemsetD2D8_v2,
        cuMipmappedArrayGetSparseProperties,     cuModuleGetLoadingMode, cuModuleGetSurfRef, cuModuleGetTexRef,
    cuOccupancyAvailableDynamicSMemPerBlock, cuOccupancyMaxActiveBlocksPerMultiprocessor,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cuOccupancyMaxActiveClusters,
    cuOccupancyMaxPotentialBlockSize, cuOccupancyMaxPotentialBlockSizeWithFlags,
    cuOccupancyMaxPotentialClusterSize, cuParamSetSize, cuParamSetTexRef, cuParamSetf, cuParamSeti,
    cuParamSetv, cuPointerGetAttributes, cuProfilerInitialize, cuProfilerStart, cuProfilerStop,
    cuSignalExternalSemaphoresAsync, cuStreamAddCallback, cuStreamBatchMemOp, cuStreamBatchMemOp_v2,
    cuStreamBeginCaptureToCig, cuStreamBeginCaptureToGraph,     cuStreamBeginRecaptureToGraph, cuStreamCopyAttributes, cuStreamEndCaptureToCig,
    cuStreamGetAttribute, cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v3,
    cuStreamGetCtx_v2, cuStreamGetDevResource, cuStreamGetDevice, cuStreamGetGreenCtx,
    cuStreamSetAttribute, cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_v2,
    cuStreamWaitValue32, cuStreamWaitValue32_v2, cuStreamWaitValue64, cuStreamWaitValue64_v2,
    cuStreamWriteValue32, cuStreamWriteValue32_v2, cuStreamWriteValue64, cuStreamWriteValue64_v2,
    cuSurfObjectCreate, cuSurfObjectDestroy, cuSurfObjectGetResourceDesc, cuSurfRefGetArray,
    cuSurfRefSetArray, cuTensorMapEncodeIm2col, cuTensorMapEncodeIm2colWide, cuTensorMapEncodeTiled,
    cuTensorMapReplaceAddress, cuTexObjectCreate, cuTexObjectDestroy, cuTexObjectGetResourceDesc,
    cuTexObjectGetResourceViewDesc, cuTexObjectGetTextureDesc, cuTexRefCreate, cuTexRefDestroy,
    cuTexRefGetAddressMode, cuTexRefGetAddress_v2, cuTexRefGetArray, cuTexRefGetBorderColor,
    cuTexRefGetFilterMode, cuTexRefGetFlags, cuTexRefGetFormat, cuTexRefGetMaxAnisotropy,
    cuTexRefGetMipmapFilterMode, cuTexRefGetMipmapLevelBias, cuTexRefGetMipmapLevelClamp,
    cuTexRefGetMipmappedArray, cuTexRefSetAddress2D_v3, cuTexRefSetAddressMode, cuTexRefSetAddress_v2,
    cuTexRefSetArray, cuTexRefSetBorderColor, cuTexRefSetFilterMode, cuTexRefSetFlags, cuTexRefSetFormat,
    cuTexRefSetMaxAnisotropy, cuTexRefSetMipmapFilterMode, cuTexRefSetMipmapLevelBias,
    cuTexRefSetMipmapLevelClamp, cuTexRefSetMipmappedArray,     cuUserObjectCreate, cuUserObjectRelease, cuUserObjectRetain, cuWaitExternalSemaphoresAsync,
}
